"""The formulas of context parallelism: the papers' figures for even parts, sums by hand for uneven ones."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distlab.techniques.context_parallel.costs import (
    causal_share,
    even_ring_bytes,
    even_ring_turns,
    gathered_bytes,
    gathered_calls,
    ring_bytes,
    ring_rows,
    shift_rows,
    ulysses_bytes,
    ulysses_messages,
)
from distlab.techniques.context_parallel.strategy import contiguous, zigzag
from distlab.techniques.tensor_parallel.layers import partition_sizes

RANKS = st.integers(1, 8)


@given(RANKS, st.integers(1, 9), st.integers(1, 9))
def test_even_parts_send_the_papers_bytes(ranks: int, each: int, heads: int) -> None:
    rows, of_heads = (each,) * ranks, (heads,) * ranks
    row_bytes = 2 * heads * ranks * 4  # K and V of all heads, one number each
    everything = sum(rows) * row_bytes
    for rank in range(ranks):
        assert gathered_bytes(rows, row_bytes, rank) == pytest.approx(2 * (ranks - 1) / ranks * everything)
        for again in (False, True):
            even = even_ring_bytes(everything, ranks, again=again)
            assert ring_bytes(rows, row_bytes, rank, again=again) == pytest.approx(even)
            assert len(ring_rows(rows, rank, again=again)) == even_ring_turns(ranks, again=again)
        assert ring_bytes(rows, row_bytes, rank) == pytest.approx(3 * (ranks - 1) / ranks * everything)
        assert ulysses_bytes(rows, of_heads, 4, rank) == pytest.approx(4 * (ranks - 1) / ranks**2 * everything)


@given(RANKS, st.integers(0, 40))
def test_total_bytes_of_uneven_parts(ranks: int, length: int) -> None:
    for cut in (contiguous, zigzag):
        rows = cut(length, ranks).num_rows
        assert sum(ring_bytes(rows, 1, rank) for rank in range(ranks)) == 3 * (ranks - 1) * length
    rows, heads = contiguous(length, ranks).num_rows, partition_sizes(5, ranks)
    kept = sum(row * head for row, head in zip(rows, heads, strict=True))
    assert sum(ulysses_bytes(rows, heads, 1, rank) for rank in range(ranks)) == 8 * (length * 5 - kept)


@given(RANKS, st.integers(1, 20))
def test_zigzag_shift_sends_three_quarters_of_a_ring(ranks: int, each: int) -> None:
    positions = zigzag(2 * ranks * each, ranks)
    seen = [[positions.visible_keys(rank, other).num_keys for other in range(ranks)] for rank in range(ranks)]
    sent = [sum(shift_rows(seen, rank)) for rank in range(ranks)]
    around = 3 * (ranks - 1) * 2 * each
    assert sum(sent) == ranks * around * 3 / 4
    assert (min(sent), max(sent)) == (around * 2 / 3, around * 5 / 6)  # the first rank of the fold, and the last


def test_three_ranks_of_uneven_parts() -> None:
    assert ring_rows((3, 2, 2), 0) == [3, 2, 3, 2, 2, 2]  # its own, then rank 2's; again; gradients of ranks 2 and 1
    assert ulysses_messages((3, 2, 2), (2, 1, 0), 0) == [9, 0, 4, 4, 3, 0, 12, 12]
    assert gathered_bytes((3, 2, 2), 10, 0) == 2 * 30 + 40  # its own to two, and of the sum all but its own


@pytest.mark.parametrize(
    ("rows", "backend", "calls"),
    [
        ((2, 2), "gloo", [2, 2]), ((2, 2), "nccl", [2, 2]), ((2, 2, 2), "nccl", [2, 2, 2]),
        ((2, 2, 2), "tcp", [3, 3, 3]), ((2, 2, 1), "gloo", [3, 3, 3]), ((2, 2, 1), "tcp", [4, 4, 4]),
        ((1, 1, 0), "gloo", [3, 3, 1]), ((1, 1, 0), "tcp", [3, 3, 2]), ((4,), "gloo", [0]),
    ],
)  # fmt: skip
def test_calls_of_a_gather_and_a_scatter(rows: tuple[int, ...], backend: str, calls: list[int]) -> None:
    assert [gathered_calls(rows, rank, backend) for rank in range(len(rows))] == calls


def test_causal_work_of_the_last_rank() -> None:
    assert [causal_share(ranks) for ranks in (1, 2, 4)] == [1, 1.5, 1.75]
    long = contiguous(4000, 4)
    assert long.pairs(3) * 4 / sum(map(long.pairs, range(4))) == pytest.approx(causal_share(4), abs=1e-3)
