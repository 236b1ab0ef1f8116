"""Where each rank stands in the file's mesh: the last axis innermost, as in a DeviceMesh."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Grid:
    """Axes and sizes."""

    axes: Mapping[str, int]

    def index(self, rank: int, axis: str) -> int:
        """A rank's place along an axis; 0 along one that is not there."""
        return self._places(rank).get(axis, 0)

    def neighbours(self, rank: int) -> dict[str, Sequence[int]]:
        """Along each axis the ranks that differ in it alone, this one among them."""
        ranks = torch.arange(self.size).view(*self.axes.values())
        places = list(self._places(rank).values())
        found: dict[str, Sequence[int]] = {}
        for dim, axis in enumerate(self.axes):
            row = [slice(None) if each == dim else place for each, place in enumerate(places)]
            found[axis] = ranks[tuple(row)].tolist()
        return found

    @property
    def size(self) -> int:
        """Of all axes."""
        return math.prod(self.axes.values())

    def _places(self, rank: int) -> dict[str, int]:
        places = {}
        for axis in reversed(list(self.axes)):
            rank, places[axis] = divmod(rank, self.axes[axis])
        return {axis: places[axis] for axis in self.axes}
