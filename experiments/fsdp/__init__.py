"""Sharded data parallelism (ZeRO, FSDP): every rank trains the whole model, and keeps a part of it.

Data parallelism holds N copies of everything. In float32 with Adam a parameter costs 16 bytes on every rank: 4 its
weight, 4 its gradient, 8 the two moments; a model of 7 billion needs 112 GB (in mixed precision too: 2 + 2 + 4 + 4 +
4), before the first activation. But a rank needs a weight only while its layer computes, a gradient only until it is
summed, and the moments only to step. So each rank owns an N-th of every layer, and the rest is gathered when needed and
freed afterwards.

  predicted   at rest, bytes per parameter: dp 16; zero1 8 + 8/N; zero2 4 + 12/N; zero3 16/N (Rajbhandari et al. 2020,
              "ZeRO", section 5). Sent, of S bytes of weights: zero1 and zero2 2(N-1)/N x S, like dp; zero3
              3(N-1)/N x S, since it gathers weights forward and backward; with LAB_RESHARD=0 2(N-1)/N x S again. zero2
              and zero3 keep no gradients, so they sum those of each of M microbatches: (M+1) and 3M in place of 2 and
              3; zero3_blocking sums by an all_reduce and keeps a part of it: 4(N-1)/N x S, 4M with M microbatches
  shapes      inputs [B/N, S] per rank; a layer's parameters one flat vector [N·c], c = ceil(P/N); the shards [c], the
              last one shorter

After the replicas comes the whole idea, without any overlap. Each of zero1 to zero3 shards one more thing:

  dp              plain replicas, `bucketed` of RUN_MODE=dp: everything on every rank, to see what sharding saves
  zero3_blocking  a layer is gathered, computes and is freed, forward and again backward; every rank waits for each
                  call: 4(N-1)/N x S, twice the bytes of dp, and nothing overlaps
  zero1           a rank has optimizer state for its own shard only: gradients are reduce-scattered, and the new weights
                  are gathered after the step
  zero2           gradients too: they are summed layer by layer during the backward pass, and the rest is freed
  zero3           weights too: a layer is gathered while the one before computes, and freed after it has computed
  fsdp2           PyTorch's fully_shard, which does what zero3 does
"""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distlab.contract import Mode, Strategy, Variant, ruled_out
from distlab.lab.checkpoint import bugs as checkpoints
from distlab.lab.config import Config
from distlab.lab.lab import Lab
from distlab.lab.measure.event_order import Order
from distlab.lab.measure.prediction import Prediction
from distlab.lab.verify.run_all import measure
from distlab.lab.workload.model import Model
from distlab.techniques.collectives.by_hand import Collective
from distlab.techniques.collectives.phases import phase
from distlab.techniques.data_parallel.buckets import GradientBuckets
from distlab.techniques.data_parallel.slow_link import all_reduce_of_buckets
from distlab.techniques.data_parallel.strategy import Replica
from distlab.techniques.mesh.grid import Mesh
from distlab.techniques.sharded.costs import FULLY_SHARD_CRASHES
from distlab.techniques.sharded.flat_parameter import FlatParameter, FlatUnits, FullySharded, Sharded
from distlab.techniques.sharded.zero import Zero

from . import lesson
from .bugs import mistake
from .checks import check_order, claims
from .options import Options
from .predictions import BLOCKING, BY_HAND, owned_parameters, predict, predict_peaks, published, summary

Compute: TypeAlias = Callable[[Tensor], Tensor]


# --- the variants, in reading order ---


def dp(model: Model, mesh: Mesh, config: Config) -> Strategy:
    """Plain replicas: everything on every rank, and gradients summed in buckets, as `bucketed` of RUN_MODE=dp."""
    summed, size = all_reduce_of_buckets(mesh.group, config), config.bucket_mib * 2**20
    return Replica(model, config, GradientBuckets(model.parameters(), mesh.group, size, all_reduce=summed))


def zero3_blocking(model: Model, mesh: Mesh, config: Config) -> Strategy:
    """Every layer is a flat vector [N·c] of which each rank stores a chunk [c]; it is whole only while it computes."""
    model.recompute = False  # each layer is recomputed in any case
    units = FlatUnits(model, list(model.layers), mesh.group, keeps_whole=False)
    for layer, index in zip(model.layers, units.unit_of, strict=True):
        unit = units.units[index]
        layer.forward = partial(GatheredLayer.apply, layer.forward, unit, mesh.group, unit.shard)
    return Sharded(model, units, mesh.group, config)


class GatheredLayer(torch.autograd.Function):
    """A layer as a function of this rank's shard: all ranks use the shard, so its gradient is a sum over the ranks."""

    @staticmethod
    def forward(
        ctx: Any, compute: Compute, unit: FlatParameter, group: dist.ProcessGroup, _shard: Tensor, hidden: Tensor
    ) -> Tensor:
        ctx.compute, ctx.unit, ctx.group = compute, unit, group
        ctx.save_for_backward(hidden)  # nothing else is kept
        unshard(unit, group)
        computed = compute(hidden)
        unit.free()
        return computed

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None, Tensor, Tensor | None]:
        hidden = ctx.saved_tensors[0].detach()
        hidden.requires_grad_(hidden.is_floating_point())  # bytes of text have no gradient
        unshard(ctx.unit, ctx.group)
        with torch.enable_grad():
            ctx.compute(hidden).backward(gradient)
        own = reduce_scatter_gradients(ctx.unit, ctx.group)
        ctx.unit.free()
        return None, None, None, own, hidden.grad


def unshard(unit: FlatParameter, group: dist.ProcessGroup) -> None:
    """Gather the unit's vector, of which its parameters are views."""
    with phase("all_gather"):
        chunks = list(unit.materialize().chunk(unit.num_ranks))  # of [N·c], a [c] from each rank
        dist.all_gather(chunks, unit.local, group=group)


def reduce_scatter_gradients(unit: FlatParameter, group: dist.ProcessGroup) -> Tensor:
    """Sum the gradients over all ranks; return this rank's part of the sum, and free the gradients."""
    flat = torch.zeros_like(unit.whole)  # [N·c]
    for parameter, view in zip(unit.named.values(), unit.views(flat), strict=True):
        if parameter.grad is not None:  # of a unit with two layers the other one's are None
            view.copy_(parameter.grad)
            parameter.grad = None
    with phase("all_reduce"):
        dist.all_reduce(flat, group=group)
    return flat[unit.rank * unit.chunk :][: unit.length].clone()


def plain(model: Model, mesh: Mesh, config: Config) -> Strategy:
    """The lesson on one page: zero3 without overlap."""
    model.recompute = False  # each layer is recomputed in any case
    return Sharded(model, LessonUnits(model, mesh.group), mesh.group, config)


class LessonUnits(FlatUnits):
    """The lesson's units, one per layer, as `Sharded` steps, compares and saves them."""

    def __init__(self, model: Model, group: dist.ProcessGroup) -> None:
        names = {parameter: name for name, parameter in model.named_parameters()}
        self.keeps_whole, self.collective = False, Collective(group)
        self.units = [
            LessonUnit({names[each]: each for each in layer.parameters()}, lesson.Unit(layer, group))
            for layer in model.layers
        ]


class LessonUnit(FlatParameter):
    """A unit of the lesson; its shard includes the padding."""

    def __init__(self, named: dict[str, nn.Parameter], unit: lesson.Unit) -> None:
        self.named, self.shapes = named, {name: parameter.shape for name, parameter in named.items()}
        self.num_ranks, self.rank, self.whole = unit.group.size(), unit.group.rank(), unit.whole
        self.numel, self.chunk = len(unit.whole) - len(unit.padding), len(unit.shard)
        self.length, self.start = self.chunk, self.rank * self.chunk
        self.shard = self.master = unit.shard


def zero(model: Model, mesh: Mesh, config: Config, *, stage: int) -> Strategy:
    """Each stage of ZeRO shards one more copy."""
    sharded = Zero(model, list(model.layers), mesh.group, stage=stage, reshard=config.own(Options).reshard)
    return Sharded(model, sharded, mesh.group, config)


def fsdp2(model: Model, mesh: Mesh, config: Config) -> Strategy:
    """PyTorch's fully_shard.

    One wrap unit per block, and one for embedding and output layer. It is ZeRO-3: every parameter is a DTensor, sharded
    along its first dim. As in zero3 all units are freed after their forward pass (by default PyTorch keeps the
    outermost one). gloo's reduce_scatter is an all_reduce and a slice, so on gloo it sends 4(N-1)/N·S where zero3 sends
    3(N-1)/N·S.
    """
    # Imported here: it takes half a second, and no other variant needs it.
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policies: dict[str, Any] = {
        "mesh": DeviceMesh.from_group(mesh.group, "cuda" if config.device == "cuda" else "cpu"),
        "reshard_after_forward": config.own(Options).reshard,
    }
    if config.dtype == "bfloat16" and next(model.parameters()).dtype == torch.bfloat16:  # and not in the proof
        model.float()  # float32 masters, as ours
        policies["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    blocks = model.layers[1:-1] if model.name == "gpt" else model.layers
    for module in (*blocks, model):
        fully_shard(module, **policies)
    return FullySharded(model, mesh.group, config)


# --- the run ---


def predicted(config: Config) -> list[Prediction]:
    return predict(config, reshard=config.own(Options).reshard)


def cannot(config: Config) -> dict[str, str]:
    """Return the variants that cannot run with these settings, and why."""
    return ruled_out(
        (("fsdp2",), config.gloo_on_gpus, FULLY_SHARD_CRASHES),
        (("plain",), config.tie, "LAB_TIE=1 makes two layers share a weight, which the lesson does not support"),
        (("plain",), config.dtype == "bfloat16", "LAB_DTYPE=bfloat16: the lesson has no float32 master weights"),
    )


def run(lab: Lab) -> None:
    predictions = predicted(lab.config)
    lab.say(summary(lab.config), "predict")
    lab.note("holds", owned_parameters(lab.config, lab.rank))
    lab.table(*published())
    measured = measure(lab)
    ours = [name for name in measured if name in (*BY_HAND, *BLOCKING)]
    for name in ours:
        note_units(lab, name, measured[name].order)
    reshard = lab.config.own(Options).reshard
    lab.compare_predictions([*predictions, *predict_peaks(lab, measured, reshard=reshard)], measured)
    for name in ours:
        check_order(lab, name, measured[name], reshard=reshard)


def note_units(lab: Lab, name: str, order: Order) -> None:
    """Log for the headline variant how many units were gathered at once, and how often in all."""
    whole, most, gathered = 0, 0, 0
    for event in (event for event in order.events if event.what == "held"):
        whole += 1 if event.nbytes else -1
        gathered += bool(event.nbytes)
        most = max(most, whole)
    units = len({label.partition(".")[0] for label in order.weights})
    if gathered and name == lab.mode.headline[0]:
        lab.note("units", f"at most {most} of {units} were gathered at once; {gathered} gathers in all")


MODE = Mode(
    shards=True,
    variants=(
        Variant("dp", dp),
        # It always recomputes its layers, whatever LAB_RECOMPUTE says.
        Variant("zero3_blocking", zero3_blocking, formerly="naive", recomputes=False),
        Variant("zero1", partial(zero, stage=1), sentence="Optimizer state is sharded."),
        Variant("zero2", partial(zero, stage=2), sentence="Optimizer state and gradients are sharded."),
        Variant("zero3", partial(zero, stage=3), sentence="Optimizer state, gradients and weights are sharded."),
        Variant("fsdp2", fsdp2, by_torch=True),
        Variant("plain", plain, recomputes=False, by_name=True, like="zero3_blocking"),
    ),
    headline=("zero3", "gather a layer's weights just before it computes, free them right after"),
    run=run,
    claims=claims,
    options=Options,
    predict=predicted,
    cannot=cannot,
    mistakes=mistake | checkpoints.mistake,
    gone={
        "zero3_kept": "LAB_VARIANT=zero3 with LAB_RECOMPUTE=0 keeps all activations",
        "local_clip": "LAB_BUG=per_rank_norm fails the same check",
    },
    recomputes=True,
    in_lesson={"stale_gather": ("self.whole.untyped_storage().resize_(0)", "self.gather = lambda: None")},
    reading=(
        "experiments/fsdp/lesson.py: the idea on one page, which runs alone and as the variant `plain`",
        "experiments/fsdp/__init__.py: the variants, the simplest first, and what a run of them checks",
        "distlab/techniques/sharded/flat_parameter.py: the training step, and a layer as one vector of which each rank"
        " owns a part",
        "distlab/techniques/sharded/zero.py: the three stages, and when weights are gathered and gradients summed",
    ),
)
