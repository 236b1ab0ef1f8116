"""Which member has which part of a flat vector, and which parts move when the members change.

    cut      P numbers over N members: member i has those from i·c to (i+1)·c, with c = P/N rounded up
    moves    each member needs its part of the new cut. It keeps what it has, and receives the rest from a member that
             has it

Numbers that no member has any more are lost (`gaps`). Ranges are [begin, end); `ranks` are in the order of members.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from distlab.techniques.elastic.process_group import Addressed, Regroup

Range = tuple[int, int]


class Move(NamedTuple):
    """Rank `source` sends numbers `begin` to `end` to rank `target`."""

    source: int
    target: int
    begin: int
    end: int


def chunk(total: int, size: int) -> int:
    """Return the length of all parts of `total` numbers except the last ones, which are shorter or empty."""
    return -(-total // size)


def part(total: int, place: int, size: int) -> Range:
    """Return the part of member number `place` of `size`."""
    length = chunk(total, size)
    return min(place * length, total), min((place + 1) * length, total)


def gaps(wanted: Range, has: Iterable[Range]) -> list[Range]:
    """Return the ranges of `wanted` that are in none of `has`."""
    found = [wanted]
    for begin, end in has:
        found = [
            piece
            for gap in found
            for piece in ((gap[0], min(gap[1], begin)), (max(gap[0], end), gap[1]))
            if piece[0] < piece[1]
        ]
    return found


def moves(has: Mapping[int, Range], wants: Mapping[int, Range]) -> list[Move]:
    """Return all moves, in an order that is the same on all ranks; every number must be on some rank."""
    found: list[Move] = []
    for target, wanted in wants.items():
        for begin, end in gaps(wanted, [has[target]] if target in has else []):
            while begin < end:
                source = next(rank for rank, (first, last) in has.items() if first <= begin < last)
                stop = min(end, has[source][1])
                found.append(Move(source, target, begin, stop))
                begin = stop
    return found


# Versions of a rank's shards: which steps they include, and how they were cut.
#
# If a member dies, some ranks may have a step and others not, or some the new shards and others the old. So a rank
# keeps more than one version until it knows which one is valid, and the survivors compare these names.


class Version(NamedTuple):
    """The shards after `applied` steps, as they were cut for the `number`-th time, over `ranks`."""

    number: int
    applied: int
    ranks: tuple[int, ...]  # in the order of members; empty if not cut yet, when everyone has all

    @classmethod
    def parse(cls, fields: Sequence[Any]) -> "Version":
        return cls(int(fields[0]), int(fields[1]), tuple(fields[2]))

    def range_of(self, rank: int, total: int) -> Range:
        """Return which of `total` numbers a rank has."""
        return part(total, self.ranks.index(rank), len(self.ranks)) if self.ranks else (0, total)


class StoredVersion(NamedTuple):
    """One rank's part of a version: [rows, n] of the n numbers from `begin` on."""

    version: Version
    begin: int
    part: Tensor

    def of(self, wanted: Range) -> Tensor:
        """Return the numbers of a range within the part."""
        begin, end = wanted
        assert self.begin <= begin <= end <= self.begin + self.part.shape[1], f"{wanted} is not stored here"
        return self.part[:, begin - self.begin : end - self.begin]

    @property
    def nbytes(self) -> int:
        return self.part.untyped_storage().nbytes()


class Recut(NamedTuple):
    """The result of a new cut: which rank had what, the new parts, and the bytes that this rank received."""

    has: dict[int, Range]
    ranks: tuple[int, ...]
    restored: bool  # from a checkpoint, since a part was lost
    received_bytes: int


def move_shards(
    group: Regroup, ranks: Sequence[int], rank: int, stored: StoredVersion | None, has: Mapping[int, Range],
    wants: Mapping[int, Range], like: Tensor,
) -> tuple[Tensor, int]:  # fmt: skip
    """Return this rank's part of the new cut, a new tensor like `like` [rows, ...], and the bytes received for it. A
    collective of `ranks`."""
    first, last = wants[rank]
    mine = like.new_empty(len(like), last - first)
    sent, received, pieces = list[Addressed](), list[Addressed](), list[tuple[int, Tensor]]()
    for move in moves(has, wants):
        if move.source == rank:
            assert stored is not None, "a source has stored the version"
            sent.append((ranks.index(move.target), stored.of((move.begin, move.end)).contiguous()))
        if move.target == rank:
            pieces.append((move.begin, like.new_empty(len(like), move.end - move.begin)))
            received.append((ranks.index(move.source), pieces[-1][1]))
    group.exchange(sent, received)
    if stored is not None:
        pieces.append((stored.begin, stored.part))
    for at, piece in pieces:
        begin, end = max(at, first), min(at + piece.shape[1], last)
        if begin < end:
            mine[:, begin - first : end - first] = piece[:, begin - at : end - at]
    return mine, sum(tensor.nbytes for _, tensor in received)


# The optimizer's step on a piece of the flat weight vector: plain SGD, or AdamW (Loshchilov and Hutter 2019).
#
# Both compute a weight from its own gradient and moments alone, so a piece is stepped like the whole, and pieces can be
# cut again at any time. Nothing is changed in place, so a step can still be undone.

BETA_1, BETA_2, ADAM_EPSILON, DECAY = 0.9, 0.999, 1e-8, 0.01  # as in torch.optim.AdamW


class Piece(NamedTuple):
    """The tensors of a step: `weights` [n], and AdamW's moments as the rows of [2, n]; SGD has no moments, [0, n]."""

    weights: Tensor
    moments: Tensor


def fresh(weights: Tensor, optimizer: str) -> Piece:
    """Return the piece before the first step."""
    return Piece(weights.clone(), weights.new_zeros(2 if optimizer == "adamw" else 0, len(weights)))


def stepped(piece: Piece, gradient: Tensor, lr: float, number: int) -> Piece:
    """Return the piece after its step `number`, which counts from 1; `gradient` [n]."""
    weights, moments = piece
    if not len(moments):
        return Piece(weights - lr * gradient, moments)
    mean = moments[0].lerp(gradient, 1 - BETA_1)
    square = BETA_2 * moments[1] + (1 - BETA_2) * gradient * gradient
    size = lr / (1 - BETA_1**number)
    denominator = square.sqrt() / (1 - BETA_2**number) ** 0.5 + ADAM_EPSILON
    return Piece(weights * (1 - lr * DECAY) - size * mean / denominator, torch.stack([mean, square]))
