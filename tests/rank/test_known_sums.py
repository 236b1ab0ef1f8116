"""The transport's operations on known numbers: all are right, and one that is wrong is named."""

from typing import Any

import pytest
import torch

import distlab
from distlab.collectives import rooted
from distlab.collectives.point_to_point import Steps
from distlab.rank.collective_self_test import CALLS, Numbers, differing, tried

pytestmark = pytest.mark.timeout(120)


@distlab.ranks(2, 4, backend="tcp", timeout_s=60)
def test_all_operations_are_as_they_should_be(rank: int, world_size: int) -> None:
    assert list(differing(rank, world_size)) == []


def lacking(*_: Any) -> Steps:
    """Nobody's part but one's own."""
    yield from ()


@distlab.ranks(3, backend="tcp", timeout_s=60)
def test_a_sum_that_lacks_a_rank_is_seen(rank: int, world_size: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rooted, "all_reduce", lacking)
        wrong = list(tried(Numbers(rank, world_size, 5, torch.float32), CALLS))
    assert {"all_reduce of 5 in float32", "the least of 5 in float32", "every second of 5 in float32"} <= set(wrong)


@distlab.ranks(3, backend="tcp", timeout_s=60)
def test_a_part_that_goes_to_another_rank_is_seen(rank: int, world_size: int) -> None:
    right = rooted.scatter
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rooted, "scatter", lambda peers, place, tensors, root: right(peers, place, tensors[::-1], root))
        wrong = list(tried(Numbers(rank, world_size, 5, torch.uint8), ["scatter", "gather"]))
    assert wrong == ["scatter of 5 in uint8"] or (rank == 1 and wrong == []), "the middle one has its own"
