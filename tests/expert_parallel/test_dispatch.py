"""Rows go to the ranks of their experts and come back in their order, in uneven numbers; so do their gradients."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from distlab.expert_parallel.layer import AllToAll, Dispatch
from distlab.testing.warm_ranks import Ranks

pytestmark = pytest.mark.timeout(120)


def rows_of(rank: int, number: int) -> torch.Tensor:
    """Rows of two numbers: whose they are, and which."""
    return torch.stack([torch.full((number,), float(rank)), torch.arange(float(number))], 1)


def swapped(group: dist.ProcessGroup, table: list[list[int]]) -> list[list[float]]:
    """What comes to this rank, where rank r sends `table[r][p]` rows to p."""
    rank = group.rank()
    give, take = table[rank], [of_rank[rank] for of_rank in table]
    came: list[list[float]] = AllToAll(group)(rows_of(rank, sum(give)), give, take).tolist()
    return came


@pytest.mark.parametrize(
    "table", [[[1, 2], [0, 3]], [[0, 0], [0, 0]], [[2, 0, 1], [0, 0, 0], [3, 1, 4]]], ids=["two", "none", "three"]
)
def test_rows_come_rank_after_rank(ranks: Ranks, table: list[list[int]]) -> None:
    for rank, came in enumerate(ranks(len(table), swapped, table)):
        wanted = []
        for source, of_rank in enumerate(table):
            first = sum(of_rank[:rank])
            wanted += [[float(source), float(first + index)] for index in range(of_rank[rank])]
        assert came == wanted


def around(
    group: dist.ProcessGroup, held: list[range], admitted: list[list[int]]
) -> tuple[Any, Any, Any, tuple[list[int], list[int]]]:
    """Experts that multiply by their number and one: what comes back, the gradient of the rows, what was computed."""
    rank, computed = group.rank(), []
    carries = Dispatch(held, range(group.size()), rank, AllToAll(group))
    sorted_rows = rows_of(rank, sum(admitted[rank]))
    rows = sorted_rows[carries.addressed(admitted)].requires_grad_()

    def compute(there: torch.Tensor, counts: list[int]) -> torch.Tensor:
        computed.append(counts)
        factors = torch.tensor([float(expert + 1) for expert in held[rank]])
        return there * factors.repeat_interleave(torch.tensor(counts, dtype=torch.long))[:, None]

    back = carries(rows, admitted, compute)
    back.sum().backward()
    assert rows.grad is not None
    return back.tolist(), rows.grad.tolist(), computed, carries.numbers(admitted)


ADMITTED = [[2, 0, 1], [1, 3, 0], [0, 0, 0]]


@pytest.mark.parametrize(
    "held", [[range(2), range(2, 3), range(3, 3)], [range(1), range(1, 2), range(2, 3)]], ids=["an empty rank", "even"]
)
def test_experts_see_their_rows_and_ranks_their_own_again(ranks: Ranks, held: list[range]) -> None:
    for rank, (back, gradient, computed, (give, take)) in enumerate(ranks(3, around, held, ADMITTED)):
        factors = [float(expert + 1) for expert, count in enumerate(ADMITTED[rank]) for _ in range(count)]
        assert back == [[rank * factor, index * factor] for index, factor in enumerate(factors)]
        assert gradient == [[factor, factor] for factor in factors]
        assert computed == [[sum(of_rank[expert] for of_rank in ADMITTED) for expert in held[rank]]]
        assert (sum(give), sum(take)) == (sum(ADMITTED[rank]), sum(computed[0]))


def test_ranks_that_share_experts_all_get_their_rows(ranks: Ranks) -> None:
    """Both hold both experts: each row goes to each, and comes back from each."""
    admitted = [[1, 1], [2, 0]]
    (first, gradient, computed, numbers), _ = ranks(2, around, [range(2), range(2)], admitted)
    assert first == [[0.0, 0.0], [0.0, 2.0]] * 2
    assert gradient == [[1.0, 1.0], [2.0, 2.0]] * 2
    assert computed == [[3, 1]]
    assert numbers == ([2, 2], [2, 2])
