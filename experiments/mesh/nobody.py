"""Neighbours that are made up, for a rank by itself: what comes from them is zeros, and what they are sent stays as
long as they may read it.
"""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from experiments.mesh.held import Rank
from workers.parallel.schedules import Action, gives, needs
from workers.parallel.sequence import Sequence
from workers.parallel.vocabulary import own_tokens

AHEAD = 2  # receives that a rank may have posted: the rule, and not what boundaries.py does, so that more are seen


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
    """A Collective that gets zeros; what all would have sent for a sum has its memory, which is kept."""

    def __init__(self, place: Place) -> None:
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

    def __init__(self, place: Place, num_rows: int) -> None:
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
    """Holds what CrossEntropy of parallel/vocabulary.py holds: the probabilities, which targets are this rank's, and
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
