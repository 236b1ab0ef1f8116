"""Who of the members holds which part of a flat vector, whose copy lies with whom, and what moves when members change.

    cut      P numbers over N members: member i has those from i·c to (i+1)·c, with c = P/N rounded up
    copies   members lie in pairs and keep each other's part; of an odd number the last three do so in a ring. So two
             that die at once take a part with them in N/2 of N(N-1)/2 cases, where one large ring has N of them
             (placement in groups, and mixed: Gemini, Wang et al., SOSP 2023, section 4)
    moves    each member wants its parts of the new cut. What it has stays where it is, the rest comes from one who has
             it, of several from who has sent least

What nobody has any more is lost (`gaps`). Ranges are [begin, end); ranks stand in the order of their members.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from distlab.elastic.process_group import Addressed, Regroup

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


def keeper(place: int, size: int) -> int | None:
    """The number of the member that keeps the copy of `place`'s part; None where there is no other."""
    if size == 1:
        return None
    ring = size - 3 if size % 2 else size
    return place ^ 1 if place < ring else ring + (place - ring + 1) % 3


def wards(place: int, size: int) -> list[int]:
    return [each for each in range(size) if keeper(each, size) == place]


def owned_ranges(total: int, ranks: Sequence[int], *, copies: bool) -> dict[int, list[Range]]:
    """What each of `ranks` holds once `total` numbers are cut over them: its own part first, then those it keeps."""
    size = len(ranks)
    return {
        rank: [part(total, each, size) for each in (place, *(wards(place, size) if copies else ()))]
        for place, rank in enumerate(ranks)
    }


def lacking(wanted: Range, has: Iterable[Range]) -> list[Range]:
    """What of `wanted` is in none of `has`."""
    gaps = [wanted]
    for begin, end in has:
        gaps = [
            piece
            for gap in gaps
            for piece in ((gap[0], min(gap[1], begin)), (max(gap[0], end), gap[1]))
            if piece[0] < piece[1]
        ]
    return gaps


def gaps(has: Mapping[int, Sequence[Range]], total: int) -> list[Range]:
    return lacking((0, total), [each for ranges in has.values() for each in ranges])


def moves(has: Mapping[int, Sequence[Range]], wants: Mapping[int, Sequence[Range]]) -> list[Move]:
    """All that has to be sent, in an order that is the same on all ranks; everything is had by somebody."""
    sent = dict.fromkeys(has, 0)
    found: list[Move] = []
    for target, ranges in wants.items():
        for begin, end in [gap for wanted in ranges for gap in lacking(wanted, has.get(target, ()))]:
            while begin < end:
                offers = {rank: upto(begin, ranges) for rank, ranges in has.items() if upto(begin, ranges) > begin}
                assert offers, f"nobody has the numbers from {begin} on"
                source = min(offers, key=lambda rank: sent[rank])
                stop = min(end, offers[source])
                found.append(Move(source, target, begin, stop))
                sent[source] += stop - begin
                begin = stop
    return found


def upto(begin: int, has: Sequence[Range]) -> int:
    """How far one of `has` reaches from `begin` on; `begin` itself where none has it."""
    return max((end for first, end in has if first <= begin < end), default=begin)


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


class HeldVersion(NamedTuple):
    """What one rank has of a version: [rows, n] of each range, its own part first, then the copies that it keeps."""

    version: Version
    parts: dict[Range, Tensor]

    def of(self, wanted: Range) -> Tensor:
        """That of a range which lies in one of the parts."""
        begin, end = wanted
        for (first, last), tensor in self.parts.items():
            if first <= begin and end <= last:
                return tensor[:, begin - first : end - first]
        raise AssertionError(f"{wanted} is not held")

    @property
    def nbytes(self) -> int:
        storages = [tensor.untyped_storage() for tensor in self.parts.values()]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


class Recut(NamedTuple):
    """Shards that were cut anew: from which version, who had what of it, for whom, and what this rank was sent."""

    version: Version
    has: dict[int, list[Range]]
    ranks: tuple[int, ...]
    restored: bool  # from a checkpoint, since something was lost
    received_bytes: int


def move_shards(
    group: Regroup, ranks: Sequence[int], rank: int, held: HeldVersion | None, has: Mapping[int, Sequence[Range]],
    wants: Mapping[int, Sequence[Range]], like: Tensor,
) -> tuple[dict[Range, Tensor], int]:  # fmt: skip
    """A collective of `ranks`: this rank's parts of the new cut, new tensors like `like` [rows, ...], and the bytes
    that it was sent for them."""
    parts = {wanted: like.new_empty(len(like), wanted[1] - wanted[0]) for wanted in wants[rank]}
    sent, received, pieces = list[Addressed](), list[Addressed](), list[tuple[Range, Tensor]]()
    for move in moves(has, wants):
        place = (move.begin, move.end)
        if move.source == rank:
            assert held is not None, "who has something holds the version"
            sent.append((ranks.index(move.target), held.of(place).contiguous()))
        if move.target == rank:
            pieces.append((place, like.new_empty(len(like), move.end - move.begin)))
            received.append((ranks.index(move.source), pieces[-1][1]))
    group.exchange(sent, received)
    own = {} if held is None else held.parts
    for wanted, tensor in parts.items():
        for (begin, end), piece in [*own.items(), *pieces]:
            first, last = max(begin, wanted[0]), min(end, wanted[1])
            if first < last:
                tensor[:, first - wanted[0] : last - wanted[0]] = piece[:, first - begin : last - begin]
    return parts, sum(tensor.nbytes for _, tensor in received)
