"""A rank by itself: its stages, its slices and its positions do a step in their order, and all neighbours are made up.

What its passes hold is torch's affair: which tensors an operation saves, and what it leaves for the next. So it is
counted where nothing is sent, summed or kept: the neighbours are nobody (below), and a gradient goes as soon as it
is there. What a mesh keeps on top of that is a matter of formulas (predictions.py).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from distlab.context_parallel.strategy import share_out
from distlab.lab import Lab
from distlab.pipeline_parallel.pipeline import ReducingPipeline
from distlab.pipeline_parallel.schedules import Action, gives, needs
from distlab.pipeline_parallel.strategy import ByHand, parts_of
from distlab.sharded.costs import Happening
from distlab.sharded.flat_parameter import as_many_as_all
from distlab.tensor_parallel.layers import LocalRegion, Sequence, own_tokens, rows_inside, shares
from distlab.tensor_parallel.strategy import slice_layers
from distlab.verify.counted import WARMUP_STEPS, Watch
from distlab.workload.model import VOCABULARY, Model, causal

from .placement import Rank
from .stack import Turned, own_masks, prepared

# Neighbours that are made up, for a rank by itself: what comes from them is zeros, and what they are sent stays as
# long as they may read it.

AHEAD = 2  # receives that a rank may have posted: the rule, and not what pipeline.py does, so that more are seen


class FakeGroup:
    """A group of nobody: this rank's place along an axis, and how long that is."""

    def __init__(self, rank: Rank, axis: str) -> None:
        self._at, self._ranks = rank.at[axis], rank.sizes[axis]

    def rank(self) -> int:
        return self._at

    def size(self) -> int:
        return self._ranks


class Zeros:
    """A Collective that gets zeros; what all would have sent for a sum has its memory, which is kept."""

    def __init__(self, place: FakeGroup) -> None:
        self.peers = SimpleNamespace(rank=place.rank(), world_size=place.size())
        self.scratch: Tensor | None = None

    def all_gather(self, rows: Tensor, _chunk: Tensor) -> None:
        rows.zero_()

    def reduce_scatter(self, chunk: Tensor, _rows: Tensor) -> None:
        numel = self.peers.world_size * chunk.numel()
        if self.scratch is None or self.scratch.numel() < numel:
            self.scratch = None
            self.scratch = chunk.new_empty(numel)
        chunk.zero_()


class RowsOfNobody(Sequence):
    """Sequence parallelism with such collectives."""

    def __init__(self, place: FakeGroup, num_rows: int) -> None:
        made: Any = Zeros(place)
        self.scattering = self.gathering = made
        self.num_rows = num_rows


class OwnScores(nn.Module):
    """The loss of this rank's part of the vocabulary, from byte `first` on."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self.first = first

    def forward(self, scores: Tensor, targets: Tensor) -> Tensor:
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32)).flatten(0, -2)
        return OwnSoftmax.apply(scores, targets.flatten(), self.first)  # type: ignore[no-untyped-call, no-any-return]


class OwnSoftmax(torch.autograd.Function):
    """Holds what CrossEntropy of tensor parallelism holds: the probabilities, which targets are this rank's, and
    backward a gradient beside them. PyTorch's own has a third tensor of their size."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, targets: Tensor, first: int) -> Tensor:
        (own,), columns = own_tokens(targets, first, scores.shape[1])
        shifted = scores - scores.amax(dim=1)[:, None]
        sums = shifted.exp_().sum(1)
        ctx.save_for_backward(shifted.div_(sums[:, None]), own, columns)
        return sums.log().sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return ctx.saved_tensors[0] * gradients[0], None, None


class FromNowhere:
    """Boundaries where zeros come in, [b, ...] of a `shape`, and what goes out is kept as long as it may be read.

    AHEAD receives have their memory. What is sent stays until its answer comes: of an activation the gradient, of a
    gradient nothing before the step ends. What `copies` a message at once, as the kernel does for plain TCP, keeps
    none.
    """

    def __init__(self, shape: tuple[int, ...], like: Tensor, num_stages: int, *, copies: bool) -> None:
        self.shape, self.like, self.num_stages, self.copies = shape, like, num_stages, copies

    def agree(self, *_: Any) -> None: ...

    def begin(self, actions: list[Action], sizes: list[int]) -> None:
        self.sent: dict[tuple[bool, int, int], Tensor] = {}  # by direction, stage and microbatch
        waited = ((action, needs(action, self.num_stages)) for action in actions)
        self.due = [
            (action, sizes[action.microbatch]) for action, before in waited if before and before.stage != action.stage
        ]
        self.posted: list[Tensor] = []
        self._post()

    def _post(self) -> None:
        while self.due and len(self.posted) < AHEAD:
            self.posted.append(self.like.new_zeros(self.due.pop(0)[1], *self.shape))

    def take(self, action: Action) -> Tensor:
        came = self.posted.pop(0)
        self._post()
        if action.kind != "forward":
            self.sent.pop((True, action.stage, action.microbatch), None)
        return came

    def give(self, action: Action, tensor: Tensor) -> None:
        if gives(action, self.num_stages) is not None and not self.copies:
            self.sent[action.kind == "forward", action.stage, action.microbatch] = tensor.contiguous()

    def finish(self) -> None:
        self.sent.clear()


class RecordingReducer:
    """A Reducer that sums nothing, and notes the end of each backward pass."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    def begin(self) -> None: ...

    @contextmanager
    def microbatch(self, *, last: bool) -> Iterator[None]:  # noqa: ARG002
        yield
        self._watch.note("passed")

    def finish(self) -> None: ...


def passes_of(lab: Lab, rank: Rank, actions: list[Action]) -> list[Happening]:
    """The passes of a step on this rank, in the order of `actions`."""
    pipeline, engine = engine_of(lab, rank, actions)
    watch = Watch(lab.device)
    pipeline.reducers = {number: [RecordingReducer(watch)] for number in pipeline.stages}
    for stage in pipeline.stages.values():
        watch.over((int(index), layer) for index, layer in stage.get_submodule("layers").named_children())
    batches = lab.batches(getattr(torch, lab.config.dtype))
    watch.begin()
    with watch.storages:
        dealt = as_many_as_all(lab.dealt(batches, WARMUP_STEPS), lab.config)
        watch.note("dealt")
        engine.step(dealt)
    return watch.happenings


def engine_of(lab: Lab, rank: Rank, actions: list[Action]) -> tuple[ReducingPipeline, ByHand]:
    """This rank's pipeline with nobody beside it, and what gives it microbatches."""
    config, mesh = lab.config, lab.mesh
    model = lab.model(getattr(torch, config.dtype))
    positions = rank.how.cut(config.seq, rank.c) if rank.c > 1 else None
    if positions is not None:
        share_out(model, positions, causal, rank.at["cp"])
    if rank.t > 1:
        sliced(model, rank)
    like = next(model.parameters())
    place: Any = FakeGroup(rank, "pp")
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
    nowhere: Any = FromNowhere(shape, like, rank.p * rank.chunks, copies=config.backend == "tcp")
    pipeline.boundaries = nowhere
    return pipeline, ByHand(pipeline, model.loss, prepare=partial(prepared, positions, rank.at["cp"], None))


def sliced(model: Model, rank: Rank) -> None:
    """This rank's slices of all layers, in place."""
    place: Any = FakeGroup(rank, "tp")
    region = RowsOfNobody(place, rank.seq) if rank.rows else LocalRegion()
    slice_layers(model, place, region)
    if isinstance(region, RowsOfNobody):
        rows_inside(model, region)
    if rank.is_gpt:
        model.loss = OwnScores(sum(shares(VOCABULARY, rank.t)[: rank.at["tp"]]))
