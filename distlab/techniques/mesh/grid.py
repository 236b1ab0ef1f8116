"""A grid of named axes with a process group for each: the ranks that differ only along that axis.

    Mesh.grid({"dp": 2, "tp": 3}, world)      rank = 3·dp + tp, the last axis innermost, so that tp's ranks are
                                              neighbours
    mesh["tp"]                                the group of this rank's three
    mesh.size("pp"), mesh.index("pp")         1 and 0: a missing axis is one rank long
    mesh.across("dp", "cp")                   the group of ranks that differ along dp, cp or both

Simple strategies use one axis, whose group is `mesh.group`; combined strategies name the axes that they need. The grid
is that of Megatron-LM (Narayanan et al. 2021, section 3) and of DeviceMesh. There is no global mesh: it is passed as an
argument.
"""

import math
from collections.abc import Mapping
from datetime import timedelta

import torch
import torch.distributed as dist


class Mesh:
    """This rank's groups by axis, in the order of the grid."""

    def __init__(
        self, groups: Mapping[str, dist.ProcessGroup], world: dist.ProcessGroup | None = None, timeout_s: float = 300.0
    ) -> None:
        self.groups = dict(groups)
        self._world, self._timeout_s = world, timeout_s
        self._across: dict[tuple[str, ...], dist.ProcessGroup] = {}

    @classmethod
    def grid(cls, sizes: Mapping[str, int], world: dist.ProcessGroup, timeout_s: float = 300.0) -> "Mesh":
        """Arrange the ranks of `world` as a grid; a collective. Raises ValueError if their number does not fit."""
        if math.prod(sizes.values()) != world.size():
            product = " x ".join(f"{axis} {size}" for axis, size in sizes.items())
            raise ValueError(f"a mesh of {product} needs {math.prod(sizes.values())} ranks, not {world.size()}")
        if len(sizes) == 1:
            return cls(dict.fromkeys(sizes, world), world, timeout_s)
        ranks = torch.tensor(dist.get_process_group_ranks(world)).view(*sizes.values())
        groups = {}
        for dim, axis in enumerate(sizes):
            rows = ranks.movedim(dim, -1).reshape(-1, sizes[axis])
            groups[axis] = group_of_row(rows.tolist(), world, timeout_s, axis)
        return cls(groups, world, timeout_s)

    def across(self, *axes: str) -> dist.ProcessGroup:
        """Return the group of the ranks that differ only along these axes, in grid order. Several axes longer than one
        rank get a new group at the first call, by a collective of all ranks."""
        long = tuple(axis for axis in self.groups if axis in axes and self.size(axis) > 1)
        if len(long) < 2:
            return self.groups[(*long, *axes)[0]]
        if long not in self._across:
            grid = torch.tensor(dist.get_process_group_ranks(self.world)).view(
                [self.size(axis) for axis in self.groups]
            )
            dims = [list(self.groups).index(axis) for axis in long]
            rows = grid.movedim(dims, list(range(-len(dims), 0))).reshape(-1, math.prod(map(self.size, long)))
            name = "_".join(axis for axis in axes if axis in long)
            self._across[long] = group_of_row(rows.tolist(), self.world, self._timeout_s, name)
        return self._across[long]

    @property
    def group(self) -> dist.ProcessGroup:
        """Return the group of the only axis that is longer than one rank, or of the only axis."""
        long = [group for group in self.groups.values() if group.size() > 1] or list(self.groups.values())[:1]
        if len(long) > 1:
            raise ValueError(f"a mesh of {', '.join(self.groups)} has several groups: name the axis")
        return long[0]

    @property
    def world(self) -> dist.ProcessGroup:
        """Return the group of all ranks of the grid."""
        return self._world or self.group

    def __getitem__(self, axis: str) -> dist.ProcessGroup:
        return self.groups[axis]

    def size(self, axis: str) -> int:
        """Return the number of ranks along `axis`."""
        return self.groups[axis].size() if axis in self.groups else 1

    def index(self, axis: str) -> int:
        """Return this rank's index along `axis`."""
        return self.groups[axis].rank() if axis in self.groups else 0


def group_of_row(rows: list[list[int]], world: dist.ProcessGroup, timeout_s: float, name: str) -> dist.ProcessGroup:
    """Return the group of this rank's row. Every rank creates every row's group, in the same order, because torch
    derives a group's name from their number."""
    me = dist.get_global_rank(world, world.rank())
    timeout, backend = timedelta(seconds=timeout_s), dist.get_backend(world)
    groups = [dist.new_group(row, timeout, backend, group_desc=f"mesh_{name}") for row in rows]
    own = next(group for row, group in zip(rows, groups, strict=True) if me in row)
    assert isinstance(own, dist.ProcessGroup)
    return own
