"""A mesh of ranks: the group of an axis contains the ranks that differ only along it, and sums stay within it."""

import pytest
import torch
import torch.distributed as dist

from distlab.techniques.mesh.grid import Mesh
from tests.warm_ranks import Ranks


def places(group: dist.ProcessGroup, sizes: dict[str, int]) -> dict[str, tuple[int, int, list[int], float]]:
    """For each axis: this rank's index, the size, the ranks, and the result of an all_reduce along it."""
    mesh, found = Mesh.grid(sizes, group), {}
    for axis in sizes:
        number = torch.tensor(10.0 ** group.rank())
        dist.all_reduce(number, group=mesh[axis])
        ranks = dist.get_process_group_ranks(mesh[axis])
        found[axis] = mesh.index(axis), mesh.size(axis), ranks, float(number)
    return found


def test_the_last_axis_is_the_innermost(ranks: Ranks) -> None:
    found = ranks(8, places, {"dp": 2, "tp": 4})
    assert [of_rank["dp"][0] for of_rank in found] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [of_rank["tp"][0] for of_rank in found] == [0, 1, 2, 3, 0, 1, 2, 3]
    assert found[5]["tp"] == (1, 4, [4, 5, 6, 7], 11110000.0)
    assert found[5]["dp"] == (1, 2, [1, 5], 100010.0)


def test_three_axes_of_uneven_lengths(ranks: Ranks) -> None:
    found = ranks(8, places, {"pp": 4, "dp": 1, "tp": 2})
    assert found[5] == {
        "pp": (2, 4, [1, 3, 5, 7], 10101010.0),
        "dp": (0, 1, [5], 100000.0),
        "tp": (1, 2, [4, 5], 110000.0),
    }


def one_axis(group: dist.ProcessGroup, sizes: dict[str, int]) -> tuple[bool, int, int]:
    """Whether the mesh uses the group it was made from, and the size and index of an axis that does not exist."""
    mesh = Mesh.grid(sizes, group)
    return mesh.group is group, mesh.size("absent"), mesh.index("absent")


def test_a_mesh_of_one_axis_is_the_group_itself(ranks: Ranks) -> None:
    assert ranks(3, one_axis, {"dp": 3}) == [(True, 1, 0)] * 3


def together(group: dist.ProcessGroup, sizes: dict[str, int], axes: tuple[str, ...]) -> tuple[str, list[int], bool]:
    """The group over several axes: its description, its ranks, and whether it is created only once."""
    mesh = Mesh.grid(sizes, group)
    made = mesh.across(*axes)
    return made.group_desc, dist.get_process_group_ranks(made), mesh.across(*axes) is made


def test_a_group_over_two_axes_contains_their_ranks(ranks: Ranks) -> None:
    found = ranks(8, together, {"cp": 2, "tp": 2, "dp": 2}, ("dp", "cp"))
    assert [of_rank[1] for of_rank in found] == [[0, 1, 4, 5], [0, 1, 4, 5], [2, 3, 6, 7], [2, 3, 6, 7]] * 2
    assert {(description, once) for description, _, once in found} == {("mesh_dp_cp", True)}


def test_axes_of_size_one_add_no_ranks(ranks: Ranks) -> None:
    found = ranks(4, together, {"tp": 2, "cp": 2, "dp": 1}, ("dp", "cp"))
    assert [(description, members) for description, members, _ in found] == [
        ("mesh_cp", [0, 1]), ("mesh_cp", [0, 1]), ("mesh_cp", [2, 3]), ("mesh_cp", [2, 3])
    ]  # fmt: skip


def refused(group: dist.ProcessGroup, sizes: dict[str, int], axis: str) -> str:
    """The error message of a mesh, or the size of its group."""
    try:
        mesh = Mesh.grid(sizes, group)
        return str(mesh[axis].size() if axis else mesh.group.size())
    except ValueError as error:
        return str(error)


def test_a_wrong_number_of_ranks_is_refused(ranks: Ranks) -> None:
    assert ranks(3, refused, {"dp": 2, "tp": 2}, "") == ["a mesh of dp 2 x tp 2 needs 4 ranks, not 3"] * 3


@pytest.mark.parametrize(("sizes", "words"), [({"dp": 2, "tp": 4}, "name the axis"), ({"dp": 1, "tp": 8}, "8")])
def test_mesh_group_needs_a_single_long_axis(ranks: Ranks, sizes: dict[str, int], words: str) -> None:
    assert all(words in found for found in ranks(8, refused, sizes, ""))
