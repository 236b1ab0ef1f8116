"""The parts of a sharded state that a rank has, by version: which steps are in them, and how they were cut.

Who dies leaves some with a step and some without, or some with new shards and some with old ones. So a rank keeps more
than one version until it knows which of them stands, and those who are left compare what they have by these names.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from workers.parallel.regroup import Parcel, Regroup
from workers.parallel.shards import Range, moves


class Version(NamedTuple):
    """The shards after `applied` steps, as they were cut for the `number`-th time, over `ranks`."""

    number: int
    applied: int
    ranks: tuple[int, ...]  # in the order of their members; empty where nothing was cut yet and everyone has all

    @classmethod
    def told(cls, words: Sequence[Any]) -> "Version":
        """As it came over JSON."""
        return cls(int(words[0]), int(words[1]), tuple(words[2]))


class Held(NamedTuple):
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
        """The memory that it takes."""
        storages = [tensor.untyped_storage() for tensor in self.parts.values()]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


class Recut(NamedTuple):
    """Shards that were cut anew: from which version, who had what of it, for whom, and what this rank was sent."""

    version: Version
    has: dict[int, list[Range]]
    ranks: tuple[int, ...]
    restored: bool  # from a checkpoint, since something was lost
    received_bytes: int


def moved(
    group: Regroup, ranks: Sequence[int], rank: int, held: Held | None, has: Mapping[int, Sequence[Range]],
    wants: Mapping[int, Sequence[Range]], like: Tensor,
) -> tuple[dict[Range, Tensor], int]:  # fmt: skip
    """A collective of `ranks`: this rank's parts of the new cut, new tensors like `like` [rows, ...], and the bytes
    that it was sent for them."""
    parts = {wanted: like.new_empty(len(like), wanted[1] - wanted[0]) for wanted in wants[rank]}
    sent, received = list[Parcel](), list[tuple[Range, Parcel]]()
    for move in moves(has, wants):
        place = (move.begin, move.end)
        if move.source == rank:
            assert held is not None, "who has something holds the version"
            sent.append(Parcel(ranks.index(move.target), held.of(place).contiguous()))
        if move.target == rank:
            empty = like.new_empty(len(like), move.end - move.begin)
            received.append((place, Parcel(ranks.index(move.source), empty)))
    group.exchange(sent, [parcel for _, parcel in received])
    come = {place: parcel.tensor for place, parcel in received}
    for wanted, tensor in parts.items():
        own = {} if held is None else held.parts
        for (begin, end), piece in [*own.items(), *come.items()]:
            first, last = max(begin, wanted[0]), min(end, wanted[1])
            if first < last:
                tensor[:, first - wanted[0] : last - wanted[0]] = piece[:, first - begin : last - begin]
    return parts, sum(parcel.tensor.nbytes for _, parcel in received)
