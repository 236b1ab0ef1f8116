"""What ranks along one axis of a device mesh should hold alike, or each for itself: rank 0 compares what they tell."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

from distlab.check.rank_state import DROPOUT, Finding, RankState, typed
from distlab.cluster import name_ranks

# Dropout inside a tensor-parallel group: ranks that hold the same activations have to drop the same of them.
#
# Which ranks those are the script's own device mesh says, by an axis called tp, or LAB_MESH. Where activations differ
# they are cut, and there each rank has to draw its own: so ranks are compared only where their inputs are equal.

AXIS = "tp"


class Dropouts:
    """The first dropouts of all ranks: the state of the random generator before, and the checksum of the input."""

    def __init__(self, world_size: int, mesh: Sequence[tuple[str, int]]) -> None:
        sizes = [size for _, size in mesh]
        self._groups = groups_of(AXIS, [name for name, _ in mesh], sizes, list(range(world_size)))
        self._seen: dict[int, dict[int, tuple[int, int, str]]] = defaultdict(dict)

    def take_mesh(self, case: RankState, names: list[str], ranks: Any) -> None:  # noqa: ARG002
        """A device mesh of the script's, as nested lists of ranks."""
        sizes, level = [], ranks
        while isinstance(level, list):
            sizes.append(len(level))
            level = level[0]
        numbers = flat(ranks)
        typed(numbers, [int] * len(numbers))
        self._groups = self._groups or groups_of(AXIS, names, sizes, numbers)

    def take(self, case: RankState, index: int, state: int, given: int, place: int) -> None:
        """One dropout of one rank."""
        self._seen[index][case.rank] = state, given, case.place(place).line

    def apart(self) -> Iterator[Finding]:
        """Groups whose ranks drop others of the same activations."""
        for ranks in self._groups:
            for index, seen in sorted(self._seen.items()):
                here = [seen[rank] for rank in ranks if rank in seen]
                states, given = {state for state, _, _ in here}, {each for _, each, _ in here}
                if len(here) == len(ranks) > 1 and len(given) == 1 and len(states) > 1:
                    sentence = (
                        f"dropout #{index} at {here[0][2]}: {name_ranks(ranks)} of one tensor-parallel group have the"
                        " same activations and another state of the random generator, so each drops others; seed them"
                        " alike"
                    )
                    yield Finding(DROPOUT, sentence, tuple(ranks))
                    break


def groups_of(axis: str, names: Sequence[str], sizes: Sequence[int], ranks: Sequence[int]) -> list[list[int]]:
    """The groups along an axis of a mesh whose `ranks` stand in order, the outermost axis first; none without it."""
    if axis not in names or len(names) != len(sizes) or prod(sizes) != len(ranks):
        return []
    position = list(names).index(axis)
    size, inner = sizes[position], prod(sizes[position + 1 :])
    starts = [start for start in range(len(ranks)) if start // inner % size == 0]
    return [[ranks[start + step * inner] for step in range(size)] for start in starts]


def flat(nested: Any) -> list[int]:
    return [number for each in nested for number in flat(each)] if isinstance(nested, list) else [nested]
