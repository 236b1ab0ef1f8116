"""Parts, copies and moves: every number once, nobody its own keeper, and not a number too many on the way."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distlab.elastic.shards import Move, gaps, keeper, lacking, moves, owned_ranges, part, wards

pytestmark = pytest.mark.timeout(60)
SIZES = st.integers(1, 9)


@given(st.integers(0, 40), SIZES)
def test_parts_are_all_numbers_once(total: int, size: int) -> None:
    parts = [part(total, place, size) for place in range(size)]
    assert [number for begin, end in parts for number in range(begin, end)] == list(range(total))


@given(SIZES)
def test_each_has_one_keeper_that_is_another(size: int) -> None:
    kept = [(ward, place) for place in range(size) for ward in wards(place, size)]
    assert sorted(kept) == [(place, keeper(place, size)) for place in range(size) if size > 1]
    assert all(ward != place for ward, place in kept)
    assert all(len(wards(place, size)) <= 1 for place in range(size)), "nobody keeps two"


def test_members_lie_in_pairs_and_of_an_odd_number_three_in_a_ring() -> None:
    assert [keeper(place, 4) for place in range(4)] == [1, 0, 3, 2]
    assert [keeper(place, 5) for place in range(5)] == [1, 0, 3, 4, 2]
    assert keeper(0, 1) is None


@given(st.integers(1, 40), SIZES, SIZES, st.data())
def test_what_moves_is_what_is_lacking(total: int, before: int, after: int, data: st.DataObject) -> None:
    dead = data.draw(st.sets(st.integers(0, before - 1), max_size=before - 1))
    has = {rank: ranges for rank, ranges in owned_ranges(total, range(before), copies=True).items() if rank not in dead}
    wants = owned_ranges(total, range(100, 100 + after), copies=True)
    stay = {rank + 100: ranges for rank, ranges in has.items()}
    wants |= {rank: [] for rank in stay if rank not in wants}
    lost = [rank for rank in dead if keeper(rank, before) is None or keeper(rank, before) in dead]
    missing = [number for rank in lost for number in range(*part(total, rank, before))]
    assert [number for begin, end in gaps(has, total) for number in range(begin, end)] == sorted(missing)
    if missing:
        return
    come: dict[int, list[int]] = {rank: [] for rank in wants}
    for move in moves(stay, wants):
        assert any(begin <= move.begin < move.end <= end for begin, end in stay[move.source]), "it has what it sends"
        come[move.target] += range(move.begin, move.end)
    for rank, ranges in wants.items():
        own = {number for begin, end in stay.get(rank, []) for number in range(begin, end)}
        assert sorted(come[rank]) == sorted({n for begin, end in ranges for n in range(begin, end)} - own)


def test_of_two_that_have_it_the_one_that_has_sent_less_sends() -> None:
    found = moves({1: [(0, 4)], 2: [(0, 4)]}, {3: [(0, 2), (2, 4)]})
    assert found == [Move(1, 3, 0, 2), Move(2, 3, 2, 4)]


def test_what_is_lacking_lies_between() -> None:
    assert lacking((0, 10), [(2, 3), (5, 20)]) == [(0, 2), (3, 5)]
