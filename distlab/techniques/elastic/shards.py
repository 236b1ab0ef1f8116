"""Who of the members holds which part of a flat vector, and what moves when the members change.

    cut      P numbers over N members: member i has those from i·c to (i+1)·c, with c = P/N rounded up
    moves    each member wants its part of the new cut. What it has stays where it is, the rest comes from one who
             has it

What nobody has any more is lost (`gaps`). Ranges are [begin, end); ranks stand in the order of their members.
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
    """The length of all parts of `total` numbers but the last ones, which are shorter or empty."""
    return -(-total // size)


def part(total: int, place: int, size: int) -> Range:
    """What member number `place` of `size` holds."""
    length = chunk(total, size)
    return min(place * length, total), min((place + 1) * length, total)


def gaps(wanted: Range, has: Iterable[Range]) -> list[Range]:
    """What of `wanted` is in none of `has`."""
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
    """All that has to be sent, in an order that is the same on all ranks; everything is had by somebody."""
    found: list[Move] = []
    for target, wanted in wants.items():
        for begin, end in gaps(wanted, [has[target]] if target in has else []):
            while begin < end:
                source = next(rank for rank, (first, last) in has.items() if first <= begin < last)
                stop = min(end, has[source][1])
                found.append(Move(source, target, begin, stop))
                begin = stop
    return found


# The parts of a sharded state that a rank has, by version: which steps are in them, and how they were cut.
#
# Who dies leaves some with a step and some without, or some with new shards and some with old ones. So a rank keeps
# more than one version until it knows which of them stands, and those who are left compare what they have by these
# names.


class Version(NamedTuple):
    """The shards after `applied` steps, as they were cut for the `number`-th time, over `ranks`."""

    number: int
    applied: int
    ranks: tuple[int, ...]  # in the order of their members; empty where nothing was cut yet and everyone has all

    @classmethod
    def told(cls, words: Sequence[Any]) -> "Version":
        return cls(int(words[0]), int(words[1]), tuple(words[2]))

    def range_of(self, rank: int, total: int) -> Range:
        """Which of `total` numbers a rank has."""
        return part(total, self.ranks.index(rank), len(self.ranks)) if self.ranks else (0, total)


class HeldVersion(NamedTuple):
    """What one rank has of a version: [rows, n] of the n numbers from `begin` on."""

    version: Version
    begin: int
    part: Tensor

    def of(self, wanted: Range) -> Tensor:
        """That of a range which lies in the part."""
        begin, end = wanted
        assert self.begin <= begin <= end <= self.begin + self.part.shape[1], f"{wanted} is not held"
        return self.part[:, begin - self.begin : end - self.begin]

    @property
    def nbytes(self) -> int:
        return self.part.untyped_storage().nbytes()


class Recut(NamedTuple):
    """Shards that were cut anew: who had what, for whom, and what this rank was sent."""

    has: dict[int, Range]
    ranks: tuple[int, ...]
    restored: bool  # from a checkpoint, since something was lost
    received_bytes: int


def move_shards(
    group: Regroup, ranks: Sequence[int], rank: int, held: HeldVersion | None, has: Mapping[int, Range],
    wants: Mapping[int, Range], like: Tensor,
) -> tuple[Tensor, int]:  # fmt: skip
    """A collective of `ranks`: this rank's part of the new cut, a new tensor like `like` [rows, ...], and the bytes
    that it was sent for it."""
    first, last = wants[rank]
    mine = like.new_empty(len(like), last - first)
    sent, received, pieces = list[Addressed](), list[Addressed](), list[tuple[int, Tensor]]()
    for move in moves(has, wants):
        if move.source == rank:
            assert held is not None, "who has something holds the version"
            sent.append((ranks.index(move.target), held.of((move.begin, move.end)).contiguous()))
        if move.target == rank:
            pieces.append((move.begin, like.new_empty(len(like), move.end - move.begin)))
            received.append((ranks.index(move.source), pieces[-1][1]))
    group.exchange(sent, received)
    if held is not None:
        pieces.append((held.begin, held.part))
    for at, piece in pieces:
        begin, end = max(at, first), min(at + piece.shape[1], last)
        if begin < end:
            mine[:, begin - first : end - first] = piece[:, begin - at : end - at]
    return mine, sum(tensor.nbytes for _, tensor in received)


# An optimizer's step on a piece of the flat vector of weights: plain SGD, or AdamW (Loshchilov and Hutter 2019).
#
# Both compute a weight from its own gradient and moments alone, so a piece is stepped like the whole, and pieces can
# be cut anew at any time. Nothing is changed in place: whoever steps may still take it back.

BETA_1, BETA_2, ADAM_EPSILON, DECAY = 0.9, 0.999, 1e-8, 0.01  # torch.optim.AdamW's own


class Piece(NamedTuple):
    """What is stepped: `weights` [n], and AdamW's moments as the two rows of [2, n]; SGD's have no rows, [0, n]."""

    weights: Tensor
    moments: Tensor


def fresh(weights: Tensor, optimizer: str) -> Piece:
    """The piece before the first step."""
    return Piece(weights.clone(), weights.new_zeros(2 if optimizer == "adamw" else 0, len(weights)))


def stepped(piece: Piece, gradient: Tensor, lr: float, number: int) -> Piece:
    """The piece after its step `number`, which counts from 1; `gradient` [n]."""
    weights, moments = piece
    if not len(moments):
        return Piece(weights - lr * gradient, moments)
    mean = moments[0].lerp(gradient, 1 - BETA_1)
    square = BETA_2 * moments[1] + (1 - BETA_2) * gradient * gradient
    size = lr / (1 - BETA_1**number)
    denominator = square.sqrt() / (1 - BETA_2**number) ** 0.5 + ADAM_EPSILON
    return Piece(weights * (1 - lr * DECAY) - size * mean / denominator, torch.stack([mean, square]))
