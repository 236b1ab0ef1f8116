"""Data parallelism: the same model on every rank, a different part of the batch on each, one summed gradient.

The gradient of a mean over a batch is the weighted mean of its parts' gradients. So N ranks that each take a part, sum
their gradients and take the same step do exactly what one process does with the whole batch: it is no approximation,
only another order of additions. The cost is the all_reduce of the gradients, S bytes.

  predicted   2(N-1)/N x S bytes per rank and step, under 2S for any N (all_reduce: reduce_scatter and all_gather
              of (N-1)/N x S each; Patarasuk and Yuan 2009, theorem 1), and a latency per call: one per parameter, or
              one per bucket
  at rest     16 bytes per parameter on every rank with adamw in float32 (weight, gradient, two moments), 8 with sgd
  shapes      inputs [B/N, S] per rank, B = LAB_BATCH samples of S = LAB_SEQ bytes; every rank has all weights

The variants differ in the number of calls and in their time:

  per_parameter  one call per parameter, after the backward pass: correct, and slow
  flat           one call for all gradients in one flat bucket: fewest calls, but the link idles in the backward pass
  bucketed       one call per bucket of LAB_BUCKET_MIB, from hooks during the backward pass; two ranks on a slow link
                 exchange whole buckets
  ring           the same buckets with our own ring all_reduce (distlab/techniques/collectives/ring.py)
  ddp            PyTorch's DistributedDataParallel, which does what `bucketed` does, in C++

With LAB_MODEL=line it is the first lesson's y = wx + b.
"""

from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from distlab.contract import Mode, Strategy, Variant
from distlab.lab.checkpoint import bugs as checkpoints
from distlab.lab.config import Config
from distlab.lab.lab import Lab
from distlab.lab.verify.proof import check_replicas, check_samples
from distlab.lab.verify.run_all import measure
from distlab.lab.workload.model import Model
from distlab.techniques.collectives.by_hand import Collective
from distlab.techniques.collectives.phases import phase
from distlab.techniques.data_parallel.buckets import GradientBuckets
from distlab.techniques.data_parallel.slow_link import all_reduce_of_buckets, swaps_buckets
from distlab.techniques.data_parallel.strategy import (
    DDPGradients,
    Lesson,
    Replica,
    draw_and_broadcast,
    draw_own_weights,
)
from distlab.techniques.mesh.grid import Mesh

from . import lesson
from .checks import check_overlap, claims, mistake
from .predictions import gradient_bytes, in_unit, predict, predict_peaks


def per_parameter(model: Model, mesh: Mesh, config: Config) -> Strategy:
    """One all_reduce per parameter, after the backward pass."""
    draw_and_broadcast(model, mesh.group, config)
    return Replica(model, config, OneByOne(model, mesh.group))


class OneByOne:
    """Sums each gradient in its own call."""

    def __init__(self, model: Model, group: dist.ProcessGroup) -> None:
        self.model, self.group = model, group

    def zero(self) -> None:
        self.model.zero_grad()

    def accumulate(self, *, last: bool) -> AbstractContextManager[None]:  # noqa: ARG002  it sums at the end
        return nullcontext()

    def finish(self) -> None:
        for parameter in self.model.parameters():
            if parameter.grad is None:  # every rank must make the same calls, or they wait for each other
                parameter.grad = torch.zeros_like(parameter)
            with phase("all_reduce"):
                dist.all_reduce(parameter.grad, group=self.group)


def flat(model: Model, mesh: Mesh, config: Config) -> Strategy:
    """One all_reduce for all gradients in one bucket, after the backward pass."""
    draw_and_broadcast(model, mesh.group, config)
    return Replica(model, config, GradientBuckets(model.parameters(), mesh.group, float("inf"), overlap=False))


def bucketed(model: Model, mesh: Mesh, config: Config) -> Strategy:
    """One all_reduce per bucket, launched as soon as the bucket's last gradient is written."""
    draw_and_broadcast(model, mesh.group, config)
    summed, size = all_reduce_of_buckets(mesh.group, config), config.bucket_mib * 2**20
    return Replica(model, config, GradientBuckets(model.parameters(), mesh.group, size, all_reduce=summed))


def ring(model: Model, mesh: Mesh, config: Config) -> Strategy:
    """Like bucketed, with our own ring: hooks send its first messages, and the end of the step the others."""
    draw_and_broadcast(model, mesh.group, config)
    ours, size = partial(Collective(mesh.group, "ring").all_reduce, async_op=True), config.bucket_mib * 2**20
    return Replica(model, config, GradientBuckets(model.parameters(), mesh.group, size, all_reduce=ours))


def ddp(model: Model, mesh: Mesh, config: Config) -> Strategy:
    """PyTorch's own. It divides by the number of ranks, so its loss is multiplied by that number."""
    draw_and_broadcast(model, mesh.group, config)
    wrapped = DistributedDataParallel(
        model,
        process_group=mesh.group,
        bucket_cap_mb=config.bucket_mib,
        init_sync=False,  # the replicas are equal already
    )
    return Replica(model, config, DDPGradients(wrapped), forward=wrapped, scale=mesh.group.size())


def plain(model: Model, mesh: Mesh, config: Config) -> Strategy:
    """The lesson on one page: `bucketed` and nothing else."""
    draw_own_weights(model, mesh.group, config)
    return Lesson(model, config, lesson.DataParallel(model, mesh.group, config.bucket_mib * 2**20).step)


# --- the run ---


def run(lab: Lab) -> None:
    """Predict, prove, measure."""
    predictions = predict(lab.config)
    size, unit = in_unit(gradient_bytes(lab.config))
    sent = size * 2 * (lab.world_size - 1) / lab.world_size
    most = f"less than {2 * size:.3g} {unit} for any N"
    lab.say(f"each rank sends 2(N-1)/N x {size:.3g} {unit} = {sent:.3g} {unit} per step, {most}", "predict")
    if lab.wants("bucketed"):
        buckets = next(each.calls for each in predictions if each.variant == "bucketed")
        lab.say(
            f"{buckets} per step; each is launched in the backward pass, once it has {lab.config.bucket_mib:g} MiB",
            "buckets",
        )
        if swaps_buckets(lab.group, lab.config):
            lab.say(
                "bucketed swaps whole buckets with the other rank in one round; ddp's all_reduce needs two rounds for"
                " the same bytes",
                "sum",
            )
    if lab.config.proof:
        check_samples(lab)
    measured = measure(lab, also=partial(check_replicas, lab))
    lab.compare_predictions([*predictions, *predict_peaks(lab, measured)], measured)
    check_overlap(lab, measured)


MODE = Mode(
    variants=(
        # 0.7 s per step on four ranks, where the others take 0.1.
        Variant("per_parameter", per_parameter, formerly="naive", timed_part=4),
        Variant("flat", flat),
        Variant("bucketed", bucketed),
        Variant("ring", ring),
        Variant("ddp", ddp, by_torch=True),
        Variant("plain", plain, by_name=True, like="bucketed"),
    ),
    headline=("bucketed", "send each bucket of gradients while the next one is computed"),
    run=run,
    claims=claims,
    predict=predict,
    mistakes=mistake | checkpoints.mistake,
    gone={
        "means": "LAB_BUG=means_of_shards averages the means of uneven shards",
        "coordinator": "RUN_MODE=server LAB_VARIANT=sync collects sums and counts on rank 0",
    },
    recomputes=True,
    in_lesson={
        "means_of_shards": ("1 / targets.numel())", "1 / targets[mine].numel() / group.size())"),
        "no_sampler": ("[group.rank() :: group.size()]", "[: 11 // group.size()]"),
        "stale_bucket": ("bucket.flat.zero_()", "pass"),
        "no_broadcast": ("dist.broadcast(parameter.detach(), group=group, group_src=0)", "pass"),
    },
    reading=(
        "experiments/dp/lesson.py: the idea on one page, which runs alone and as the variant `plain`",
        "experiments/dp/__init__.py: the variants, the simplest first, and what a run of them checks",
        "distlab/techniques/data_parallel/buckets.py: gradients in flat buckets, launched from hooks",
        "distlab/techniques/collectives/ring.py: the all_reduce of `ring`",
        "distlab/techniques/data_parallel/strategy.py: the loop that all variants share",
    ),
)
