"""The formulas of tensor parallelism, compared with the papers' closed forms and with each other."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distlab.techniques.tensor_parallel.costs import (
    column_split_bytes,
    parallel_loss_bytes,
    sequence_parallel_bytes,
    sequence_parallel_calls,
    sequence_saves_bytes,
    tensor_parallel_bytes,
)

WORLDS = st.integers(1, 8)


@given(WORLDS, st.integers(1, 64), st.integers(1, 512), st.integers(1, 64))
def test_layer_bytes_equal_the_paper(world_size: int, b: int, s: int, h: int) -> None:
    """8(t-1)/t·b·s·h elements for two slices (Shoeybi 2019, section 3)."""
    elements = 8 * (world_size - 1) / world_size * b * s * h
    assert tensor_parallel_bytes(world_size, 2, 4 * b * s * h) == pytest.approx(4 * elements)


@given(WORLDS, st.integers(1, 5), st.integers(0, 40), st.integers(1, 64))
def test_sequence_parallel_total_equals_tensor_parallel(world_size: int, slices: int, rows: int, row: int) -> None:
    of_ranks = [sequence_parallel_bytes(world_size, slices, rows, row, rank) for rank in range(world_size)]
    assert sum(of_ranks) == pytest.approx(world_size * tensor_parallel_bytes(world_size, slices, rows * row))
    if rows % world_size == 0:
        assert len(set(of_ranks)) == 1


@pytest.mark.parametrize(
    ("rows", "backend", "calls"),
    [
        (5, "tcp", [6, 6, 6, 6]),  # 3 sends to scatter, 3 to gather
        (2, "tcp", [4, 4, 2, 2]),  # 2 ranks have no chunk
        (8, "tcp", [4, 4, 4, 4]),  # equal chunks are gathered in one call
        (5, "gloo", [4, 4, 4, 4]),  # one all_to_all of any chunks to scatter
        (2, "gloo", [4, 4, 1, 1]),
        (8, "gloo", [2, 2, 2, 2]),
        (5, "nccl", [6, 6, 6, 6]),
        (8, "nccl", [2, 2, 2, 2]),  # equal chunks are scattered in one call, too
    ],
)
def test_calls_of_a_scatter_and_a_gather_on_four_ranks(rows: int, backend: str, calls: list[int]) -> None:
    assert [sequence_parallel_calls(4, 1, rows, rank, backend) // 2 for rank in range(4)] == calls


def test_an_uneven_gather_is_padded() -> None:
    assert column_split_bytes(4, 10, 0, 5, 4) == 0.75 * 10 * 8 * 4  # 5 outputs go as 4 x 2
    assert column_split_bytes(4, 10, 6, 8, 4) == 0.75 * 10 * 8 * 4 + 1.5 * 10 * 6 * 4
    assert column_split_bytes(1, 10, 6, 8, 4) == 0


def test_a_loss_sends_three_numbers_per_token() -> None:
    assert parallel_loss_bytes(2, 100, 4) == 3 * 100 * 4
    assert parallel_loss_bytes(1, 100, 4) == 0


def test_a_rank_saves_the_other_ranks_rows() -> None:
    # 3 norms of b = 2 samples of 5 positions and width 16 on 2 ranks: rank 0 keeps 3 positions, rank 1 keeps 2.
    of_a_position = 2 * 16 + 2 * 2
    assert [sequence_saves_bytes(2, 3, 5, 2 * 16, 16, 4, rank) for rank in (0, 1)] == [
        3 * 2 * of_a_position * 4,
        3 * 3 * of_a_position * 4,
    ]
    assert sequence_saves_bytes(1, 3, 5, 32, 16, 4, 0) == 0
