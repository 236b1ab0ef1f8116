"""Keys that go round, against one process: any length on any number of ranks, and what a wrong line breaks."""

from collections.abc import Callable, Iterator
from itertools import chain

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from distlab.context_parallel.costs import ring_rows, shift_rows
from distlab.context_parallel.ring import Part, RingAttention, ShiftAttention
from distlab.context_parallel.strategy import Positions, contiguous, zigzag
from distlab.testing.warm_ranks import Ranks
from tests.context_parallel.attending import all_of, differences

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize("cut", [contiguous, zigzag])
@pytest.mark.parametrize(
    ("world_size", "length", "heads"), [(1, 5, 2), (2, 8, 1), (3, 13, 2), (4, 5, 3), (4, 32, 1), (5, 2, 1)]
)
def test_a_ring_does_what_one_process_does(
    ranks: Ranks, cut: Callable[[int, int], Positions], world_size: int, length: int, heads: int
) -> None:
    found = ranks(world_size, differences, RingAttention, cut, length, heads)
    assert max(chain(*(apart.values() for apart, _ in found))) < 1e-14
    rows = cut(length, world_size).num_rows
    assert [calls for _, calls in found] == [
        sum(sent > 0 for sent in ring_rows(rows, rank)) for rank in range(world_size)
    ]


@pytest.mark.parametrize("cut", [contiguous, zigzag])
@pytest.mark.parametrize(
    ("world_size", "length", "heads"), [(1, 5, 2), (2, 8, 1), (3, 13, 2), (4, 5, 3), (4, 32, 1), (5, 2, 1)]
)
def test_keys_that_go_where_they_are_seen_do_the_same(
    ranks: Ranks, cut: Callable[[int, int], Positions], world_size: int, length: int, heads: int
) -> None:
    found = ranks(world_size, differences, ShiftAttention, cut, length, heads)
    assert max(chain(*(apart.values() for apart, _ in found))) < 1e-14
    positions = cut(length, world_size)
    seen = [[positions.seen(rank, other).num_keys for other in range(world_size)] for rank in range(world_size)]
    assert [calls for _, calls in found] == [
        sum(sent > 0 for sent in shift_rows(seen, rank)) for rank in range(world_size)
    ]


class Unweighed(RingAttention):
    @staticmethod
    def merge(part: Part, more: Part) -> None:
        part.out.add_(more.out).mul_(0.5)


class Left(RingAttention):
    def hand_home(self, parts: Iterator[tuple[int, Tensor]], own: Tensor) -> Tensor:
        for _ in parts:
            pass
        return own


def one_run(group: dist.ProcessGroup, positions: Positions) -> RingAttention:
    return RingAttention(group, contiguous(positions.length, group.size()))


def test_without_log_sum_exp_the_result_is_wrong(ranks: Ranks) -> None:
    found = ranks(2, differences, Unweighed, zigzag, 8, 1)
    assert all_of(found, "out") > 1e-3


def test_gradients_that_stay_where_the_keys_were_are_those_of_the_keys_alone(ranks: Ranks) -> None:
    found = ranks(3, differences, Left, contiguous, 9, 1)
    assert max(all_of(found, "out"), all_of(found, "dq")) < 1e-14
    assert all_of(found, "dk") > 1e-3 and all_of(found, "dv") > 1e-3
    assert max(found[2][0].values()) < 1e-14  # nobody behind the last rank looks at its keys


def test_a_mask_by_local_positions_is_seen(ranks: Ranks) -> None:
    found = ranks(2, differences, one_run, zigzag, 8, 1)
    assert all_of(found, "out") > 1e-3


def sources(group: dist.ProcessGroup) -> list[int]:
    """The ranks whose keys come by, each of which sends its own number."""
    ring = RingAttention(group, contiguous(6, group.size()))
    mine = torch.full((2, 1, 1, 6 // group.size(), 1), float(group.rank()))
    came = [(source, there.unique().tolist()) for source, there in ring.around(mine)]
    assert all(numbers == [source] for source, numbers in came)
    return [source for source, _ in came]


def test_keys_come_from_the_rank_before_and_then_from_those_before_it(ranks: Ranks) -> None:
    assert ranks(3, sources) == [[2, 1], [0, 2], [1, 0]]
