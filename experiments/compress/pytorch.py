"""PyTorch's own: DistributedDataParallel with its communication hooks for fp16 and for PowerSGD.

DDP averages where we sum, so its loss is N times ours, and its hooks see N times our gradients:

  fp16      DDP divides by N after the cast, we weight before it: equal if N is a power of two; otherwise roundings
            differ, more below 6e-5, where fp16 has fewer bits. It has no error feedback, and is compared with `fp16`
            without it, up to these roundings
  powersgd  P is summed, Q averaged: N times our matrices, divided by N at the end. It draws Q with numpy, so it gets
            ours here. It begins after two dense steps, when DDP has rebuilt its buckets; in the proof they change no
            weight. It orthonormalises Q as well as P, which changes the basis but not the space, so results are equal
            up to rounding. Its second and third collective start in callbacks on gloo's threads, for several buckets
            in a different order on each rank, upon which gloo ends the process: so each bucket is waited for before
            the next one begins
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from distlab.contract import Build, Strategy
from distlab.lab.config import Config
from distlab.lab.lab import Lab
from distlab.lab.measure.tensors import Worst, difference, largest
from distlab.lab.verify.proof import check_replicas
from distlab.lab.workload.model import Model
from distlab.lab.workload.reference import plain
from distlab.techniques.compression.powersgd import first_factor, pays
from distlab.techniques.data_parallel.strategy import DDPGradients, Replica, draw_own_weights
from distlab.techniques.mesh.grid import Mesh

from .options import Options

DENSE_STEPS = 2
STEPS = 3
POWERSGD_TOLERANCE = 1e-12


def ddp_fp16(model: Model, mesh: Mesh, config: Config) -> Strategy:
    """Its fp16_compress_hook."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    return wrapped(model, mesh, config, mesh.group, fp16_compress_hook)


def ddp_powersgd(model: Model, mesh: Mesh, config: Config) -> Strategy:
    """Its powerSGD_hook, from our Q."""
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

    state = PowerSGDState(
        mesh.group, config.own(Options).low_rank, start_powerSGD_iter=DENSE_STEPS, min_compression_rate=1,
        use_error_feedback=config.own(Options).error_feedback,
    )  # fmt: skip

    def hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        if state.iter >= DENSE_STEPS and bucket.index() not in state.p_memory_dict:
            begin_with_ours(state, bucket, config)
        summed: torch.futures.Future[torch.Tensor] = powerSGD_hook(state, bucket)
        summed.wait()
        return summed

    return wrapped(model, mesh, config, state, hook)


def begin_with_ours(state: Any, bucket: dist.GradBucket, config: Config) -> None:
    """Fill the memory where it looks for P and Q: those of one shape together, ordered by their first."""
    rank = config.own(Options).low_rank
    factored = [gradient for gradient in bucket.gradients() if pays(gradient.shape, rank)]
    together = sorted(factored, key=lambda gradient: [other.shape for other in factored].index(gradient.shape))
    like = bucket.buffer()
    qs = [first_factor(torch.Size((gradient[0].numel(), rank)), config.seed).flatten() for gradient in together]
    heights = sum(len(gradient) for gradient in together)
    state.p_memory_dict[bucket.index()] = like.new_empty(heights * rank)
    state.q_memory_dict[bucket.index()] = torch.cat([like.new_empty(0), *(q.to(like) for q in qs)])


def wrapped(model: Model, mesh: Mesh, config: Config, state: Any, hook: Any) -> Strategy:
    """Return DistributedDataParallel around `model`, with a hook; its constructor broadcasts."""
    draw_own_weights(model, mesh.group, config)
    parallel = DistributedDataParallel(model, process_group=mesh.group, bucket_cap_mb=config.bucket_mib)
    parallel.register_comm_hook(state, hook)
    return Replica(model, config, DDPGradients(parallel), forward=parallel, scale=mesh.group.size())


# --- compared with ours ---


def proofs(lab: Lab, fp16: Build, powersgd: Build) -> Mapping[str, Callable[[str, Build], None]]:
    """Return proofs that compare its two hooks with our `fp16` and `powersgd`, on the same weights and batches."""
    fp16_rounding = lab.world_size * 2.0**-10  # a cast on each rank and as many additions, on both sides
    no_feedback = lab.config.with_own(error_feedback=False)
    return {
        "ddp_fp16": partial(compare_with_ours, lab, "fp16", fp16, no_feedback, fp16_rounding),
        "ddp_powersgd": partial(compare_with_ours, lab, "powersgd", powersgd, lab.config, POWERSGD_TOLERANCE),
    }


def compare_with_ours(
    lab: Lab, other: str, build_ours: Build, config: Config, tolerance: float, name: str, build: Build
) -> None:
    """Compare three steps of both in float64: losses, and gradients relative to the largest one."""
    config = plain(config)
    batches = lab.batches(torch.float64, proof=True)
    pytorchs, ours = (each(lab.model(torch.float64), lab.mesh, config) for each in (build, build_ours))
    for _ in range(DENSE_STEPS):  # without an update: DDP rebuilds its buckets, and its PowerSGD waits for that
        pytorchs.backward(lab.microbatches(batches, 0))
    worst = Worst(("losses beside ours", "gradients beside ours"))
    for step in range(STEPS):
        lab.at(step, f"proof of {name}")
        share, wanted = (strategy.backward(lab.microbatches(batches, step)) for strategy in (pytorchs, ours))
        assert share is not None
        assert wanted is not None
        worst.note("losses beside ours", (share - wanted).abs().item())
        gradients = dict(ours.full("gradients"))
        size = max(map(largest, gradients.values()))
        worst.note("gradients beside ours", difference(pytorchs.full("gradients"), gradients) / size)
        for strategy in (pytorchs, ours):
            strategy.update()
        lab.stepped()
    for check, off in worst.found.items():
        detail = f"compared with {other}" + ", relative to the largest gradient" * check.startswith("gradients")
        lab.check(check, off.value, tolerance, name, detail)
    check_replicas(lab, name, pytorchs)
