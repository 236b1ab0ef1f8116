"""A rank by itself: its stages, its slices and its positions do a step in their order, and all neighbours are made up.

What its passes hold is torch's affair: which tensors an operation saves, and what it leaves for the next. So it is
counted where nothing is sent, summed or kept: what comes from other ranks is zeros, and a gradient goes as soon as it
is there. What a mesh keeps on top of that is a matter of formulas (peak.py).
"""

from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from experiments.mesh.held import Rank
from experiments.mesh.stack import Turned, own_masks
from workers.lab import Lab
from workers.parallel.positions import contiguous, zigzag
from workers.parallel.reducing import ReducingPipeline
from workers.parallel.schedules import Action
from workers.parallel.sequence import Sequence
from workers.passes.counted import WARMUP_STEPS
from workers.passes.forgotten import Forgetting, Moment
from workers.strategies.context import OfOwnPositions, share_out
from workers.strategies.engines import ByHand, Engine
from workers.strategies.pipelined import parts_of
from workers.strategies.rows import rows_inside
from workers.strategies.sharded import as_many_as_all
from workers.strategies.slicing import slice_layers
from workers.workload.model import Model, causal


class Place:
    """A group of nobody: this rank's place along an axis, and how long that is."""

    def __init__(self, rank: Rank, axis: str) -> None:
        self._at, self._ranks = rank.at[axis], rank.sizes[axis]

    def rank(self) -> int:
        return self._at

    def size(self) -> int:
        return self._ranks


class Unsummed:
    """A Region whose other ranks add nothing."""

    def enter(self, x: Tensor) -> Tensor:
        return x.view_as(x)

    def leave(self, partial: Tensor) -> Tensor:
        return partial


class Zeros:
    """A Collective that gets zeros."""

    def __init__(self, place: Place) -> None:
        self.peers = SimpleNamespace(rank=place.rank(), world_size=place.size())

    def all_gather(self, rows: Tensor, _chunk: Tensor) -> None:
        rows.zero_()

    def reduce_scatter(self, chunk: Tensor, _rows: Tensor) -> None:
        chunk.zero_()


class RowsOfNobody(Sequence):
    """Sequence parallelism with such collectives."""

    def __init__(self, place: Place, num_rows: int) -> None:
        made: Any = Zeros(place)
        self.scattering = self.gathering = made
        self.num_rows = num_rows


class OwnScores(nn.Module):
    """The loss of this rank's part of the vocabulary."""

    def forward(self, scores: Tensor, _targets: Tensor) -> Tensor:
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32)).flatten(0, -2)
        return OwnSoftmax.apply(scores)  # type: ignore[no-untyped-call, no-any-return]


class OwnSoftmax(torch.autograd.Function):
    """Holds what CrossEntropy of parallel/vocabulary.py holds: the probabilities, and backward their gradient beside
    them. PyTorch's own has a third tensor of that size."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor) -> Tensor:
        shifted = scores - scores.amax(dim=1)[:, None]
        sums = shifted.exp_().sum(1)
        ctx.save_for_backward(shifted.div_(sums[:, None]))
        return sums.log().sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (probabilities,) = ctx.saved_tensors
        return probabilities * gradients[0]  # type: ignore[no-any-return]


class FromNowhere:
    """Boundaries where zeros come in, [b, ...] of a `shape`, and what goes out is gone."""

    def __init__(self, shape: tuple[int, ...], like: Tensor) -> None:
        self.shape, self.like = shape, like

    def agree(self, *_: Any) -> None: ...

    def begin(self, _actions: Any, sizes: list[int]) -> None:
        self.sizes = sizes

    def take(self, action: Action) -> Tensor:
        return self.like.new_zeros(self.sizes[action.microbatch], *self.shape)

    def give(self, _action: Action, _tensor: Tensor) -> None: ...

    def finish(self) -> None: ...


def moments(lab: Lab, rank: Rank, actions: list[Action]) -> list[Moment]:
    """The passes of a step on this rank, in the order of `actions`."""
    pipeline, engine = engine_of(lab, rank, actions)
    forgetting = Forgetting(lab.device)
    pipeline.reducers = {number: [forgetting] for number in pipeline.stages}
    for stage in pipeline.stages.values():
        for index, layer in stage.get_submodule("layers").named_children():
            for parameter in layer.parameters():
                parameter.register_post_accumulate_grad_hook(partial(forgetting.forget, int(index)))
    dealt = lab.dealt(lab.batches(getattr(torch, lab.config.dtype)), WARMUP_STEPS)
    with forgetting.storages:
        engine.step(as_many_as_all(dealt, lab.config))
    return forgetting.moments


def engine_of(lab: Lab, rank: Rank, actions: list[Action]) -> tuple[ReducingPipeline, Engine]:
    """This rank's pipeline with nobody beside it, and what gives it microbatches."""
    config, mesh = lab.config, lab.mesh
    model = lab.model(getattr(torch, config.dtype))
    positions = (contiguous if rank.how.swaps else zigzag)(config.seq, rank.c) if rank.c > 1 else None
    if positions is not None:
        share_out(model, positions, causal, rank.at["cp"])
    if rank.t > 1:
        sliced(model, rank)
    like = next(model.parameters())
    place: Any = Place(rank, "pp")
    parts = parts_of(model, place, [*range(rank.p)] * rank.chunks)
    stages = {
        number: Turned(stage.layers, rows=rank.rows, recompute=config.recompute)
        for number, stage in parts.stages.items()
    }
    dropouts = model.dropouts
    if dropouts is not None:
        own_masks(dropouts, positions, mesh, rows=rank.rows)
        dropouts.deal([each.inputs for each in lab.dealt(lab.batches(like.dtype), WARMUP_STEPS)])
    turned = {} if dropouts is None else {"turn_to": dropouts.turn_to}
    pipeline = ReducingPipeline(stages, actions, mesh["pp"], {}, **turned)
    shape = (rank.own_rows(), config.width) if rank.is_gpt else (config.width,)
    nowhere: Any = FromNowhere(shape, like)
    pipeline.boundaries = nowhere
    engine: Engine = ByHand(pipeline, model.loss)
    return pipeline, engine if positions is None else OfOwnPositions(engine, positions, rank.at["cp"])


def sliced(model: Model, rank: Rank) -> None:
    """This rank's slices of all layers, in place."""
    place: Any = Place(rank, "tp")
    region = RowsOfNobody(place, rank.seq) if rank.rows else Unsummed()
    slice_layers(model, place, region)
    if isinstance(region, RowsOfNobody):
        rows_inside(model, region)
    if rank.is_gpt:
        model.loss = OwnScores()
