"""Where each rank stands in the file's mesh: the last axis innermost, as in a DeviceMesh."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Grid:
    """Axes and sizes."""

    axes: Mapping[str, int]

    def index(self, rank: int, axis: str) -> int:
        """A rank's place along an axis; 0 along one that is not there."""
        return self._places(rank).get(axis, 0)

    def neighbours(self, rank: int) -> dict[str, Sequence[int]]:
        """Along each axis the ranks that differ in it alone, this one among them."""
        own = self._places(rank)
        return {
            axis: [other for other in range(self.size) if self._places(other) == own | {axis: self.index(other, axis)}]
            for axis in self.axes
        }

    @property
    def size(self) -> int:
        """Of all axes."""
        return math.prod(self.axes.values())

    def _places(self, rank: int) -> dict[str, int]:
        places = {}
        for axis in reversed(list(self.axes)):
            rank, places[axis] = divmod(rank, self.axes[axis])
        return {axis: places[axis] for axis in self.axes}
