"""Positions per rank: each is on one rank, and the visible keys of other ranks follow from the causal mask."""

from collections.abc import Callable
from itertools import chain

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from distlab.techniques.context_parallel.strategy import Positions, VisibleKeys, contiguous, zigzag

pytestmark = pytest.mark.timeout(60)
CUTS = st.sampled_from([contiguous, zigzag])


@given(CUTS, st.integers(0, 60), st.integers(1, 8))
def test_each_position_is_on_one_rank_in_order(cut: Callable[[int, int], Positions], length: int, ranks: int) -> None:
    positions = cut(length, ranks)
    rows_of_ranks = [positions.of(rank).tolist() for rank in range(ranks)]
    assert sorted(chain(*rows_of_ranks)) == list(range(length))
    assert all(rows == sorted(rows) for rows in rows_of_ranks)
    assert positions.length == length and positions.num_rows == tuple(map(len, rows_of_ranks))
    assert max(positions.num_rows) - min(positions.num_rows) <= 2


@given(CUTS, st.integers(0, 60), st.integers(1, 8))
def test_visible_keys_equal_the_causal_mask(cut: Callable[[int, int], Positions], length: int, ranks: int) -> None:
    positions = cut(length, ranks)
    for rank in range(ranks):
        rows = positions.of(rank)
        for other in set(range(ranks)) - {rank}:
            mask = rows[:, None] >= positions.of(other)
            first_row, num_keys = positions.visible_keys(rank, other)
            rectangle = torch.zeros_like(mask)
            rectangle[first_row:, :num_keys] = True
            assert torch.equal(mask, rectangle), (rank, other)


@given(CUTS, st.integers(1, 60), st.integers(1, 8))
def test_pairs_equal_the_causal_mask(cut: Callable[[int, int], Positions], length: int, ranks: int) -> None:
    positions = cut(length, ranks)
    work = [positions.pairs(rank) for rank in range(ranks)]
    mask = torch.ones(length, length, dtype=torch.bool).tril()
    assert work == [int(mask[positions.of(rank)].sum()) for rank in range(ranks)]


@pytest.mark.parametrize("ranks", range(2, 9))
def test_only_zigzag_balances_the_work(ranks: int) -> None:
    length = 2 * ranks * 50
    for cut, share in ((zigzag, 1.0), (contiguous, (2 * ranks - 1) / ranks)):
        work = [cut(length, ranks).pairs(rank) for rank in range(ranks)]
        assert max(work) * ranks / sum(work) == pytest.approx(share, abs=0.01)
    assert len({zigzag(length, ranks).pairs(rank) for rank in range(ranks)}) == 1


def test_five_positions_on_two_ranks() -> None:
    assert contiguous(5, 2).runs == ((range(3),), (range(3, 5),))
    assert zigzag(5, 2).runs == ((range(2), range(4, 5)), (range(2, 3), range(3, 4)))
    assert zigzag(5, 2).visible_keys(0, 1) == VisibleKeys(2, 2)  # position 4 sees 2 and 3
    assert zigzag(5, 2).visible_keys(1, 0) == VisibleKeys(0, 2)  # positions 2 and 3 see 0 and 1
    assert contiguous(5, 2).visible_keys(0, 1) == VisibleKeys(3, 0)


def test_own_selects_the_ranks_positions() -> None:
    x = torch.arange(14).view(2, 7)
    for rank in range(3):
        positions = zigzag(7, 3)
        assert torch.equal(positions.own(x, rank), x[:, positions.of(rank)])
