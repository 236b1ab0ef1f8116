"""Parts and moves: every number once, and no more numbers sent than needed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distlab.techniques.elastic.shards import gaps, moves, part

pytestmark = pytest.mark.timeout(60)
SIZES = st.integers(1, 9)


@given(st.integers(0, 40), SIZES)
def test_parts_have_all_numbers_once(total: int, size: int) -> None:
    parts = [part(total, place, size) for place in range(size)]
    assert [number for begin, end in parts for number in range(begin, end)] == list(range(total))


@given(st.integers(1, 40), SIZES, st.data())
def test_gaps_are_the_parts_of_dead_ranks(total: int, before: int, data: st.DataObject) -> None:
    dead = data.draw(st.sets(st.integers(0, before - 1)))
    missing = [number for rank in sorted(dead) for number in range(*part(total, rank, before))]
    remaining = [part(total, rank, before) for rank in range(before) if rank not in dead]
    assert [number for begin, end in gaps((0, total), remaining) for number in range(begin, end)] == missing


@given(st.integers(1, 40), SIZES, SIZES, st.data())
def test_moves_send_exactly_the_missing_numbers(total: int, before: int, after: int, data: st.DataObject) -> None:
    """For ranks in any order: some stay, some leave after they have sent all, some join with nothing."""
    ranks = data.draw(st.permutations(range(before)))
    has = {rank: part(total, place, before) for place, rank in enumerate(ranks)}
    wants = {rank: part(total, rank, after) for rank in range(after)}
    received: dict[int, list[int]] = {rank: [] for rank in wants}
    for move in moves(has, wants):
        begin, end = has[move.source]
        assert begin <= move.begin < move.end <= end, "the source has these numbers"
        received[move.target] += range(move.begin, move.end)
    for rank, wanted in wants.items():
        assert sorted(received[rank]) == sorted({*range(*wanted)} - {*range(*has.get(rank, (0, 0)))})


def test_gaps_lie_between_the_ranges() -> None:
    assert gaps((0, 10), [(2, 3), (5, 20)]) == [(0, 2), (3, 5)]
