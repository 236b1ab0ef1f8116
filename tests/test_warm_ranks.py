"""The pool of ranks runs functions, and names a rank that raises, dies or hangs."""

import posix
import time

import pytest
import torch
import torch.distributed as dist

from tests.warm_ranks import RankFailed, Ranks


def summed(group: dist.ProcessGroup, value: int) -> float:
    tensor = torch.tensor([float(value + group.rank())])
    dist.all_reduce(tensor, group=group)
    return tensor.item()


def broken(group: dist.ProcessGroup, how: str) -> None:
    if group.rank() == 1:
        if how == "raises":
            raise ValueError("on purpose")
        if how == "dies":
            posix._exit(5)  # without any cleanup
        time.sleep(60)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_world_size_has_its_group(ranks: Ranks, world_size: int) -> None:
    expected = sum(10 + rank for rank in range(world_size))
    assert ranks(world_size, summed, 10) == [expected] * world_size


def grouped(_group: dist.ProcessGroup) -> int:
    return dist.get_world_size(dist.new_group([0, 1]))


def test_later_groups_get_equal_names_on_all_ranks(ranks: Ranks) -> None:
    """torch names a group by the number of groups that its process has made."""
    ranks.stop()
    assert [ranks(2, grouped), ranks(2, grouped)] == [[2, 2]] * 2
    assert ranks(5, summed, 0) == [10.0] * 5


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("how", "words"), [("raises", "rank 1.*on purpose"), ("dies", "rank 1: its process ended"), ("hangs", "ranks .1.")]
)
def test_a_broken_rank_is_named_and_the_pool_recovers(ranks: Ranks, how: str, words: str) -> None:
    with pytest.raises(RankFailed, match=f"(?s){words}"):
        ranks(2, broken, how, timeout_s=3)
    assert ranks(2, summed, 1) == [3.0, 3.0]


def test_tests_of_a_group_share_a_pool_in_parallel_runs(request: pytest.FixtureRequest) -> None:
    """pytest-xdist keeps a group on one worker by the suffix of its tests' ids, so conftest.py must mark them early
    enough."""
    group = "tests/test_strangers.py"  # the group of several files on one worker
    assert request.node.get_closest_marker("xdist_group").args == (group,)
    assert request.node.nodeid.endswith(f"@{group}") == request.config.getoption("loadgroup", False)
