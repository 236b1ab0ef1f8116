"""Who holds which experts: all of them once a copy, as even as it goes, and each piece where it belongs."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distlab.expert_parallel.layer import Placement

pytestmark = pytest.mark.timeout(60)
WIDTH = 3


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 3), st.integers(1, 4), st.integers(1, 3))
def test_a_copy_holds_everything_once(experts: int, hidden: int, copies: int, ep: int, tp: int) -> None:
    placement = Placement.spread(experts, hidden, copies=copies, ep=ep, tp=tp)
    for name, shape in (("up", (experts, WIDTH, hidden)), ("down", (experts, hidden, WIDTH))):
        for copy in range(copies):
            times = torch.zeros(shape)
            for rank in placement.members(copy * ep * tp):
                part = times[placement.box(name, rank)]
                part += 1
                assert placement.shape(name, part) == shape
            assert bool((times == 1).all())


def test_ranks_are_laid_out_as_a_mesh() -> None:
    placement = Placement.spread(5, 8, copies=2, ep=2, tp=2)
    assert [placement.experts_of(rank) for rank in range(4)] == [range(3), range(3), range(3, 5), range(3, 5)]
    assert [placement.hidden_of(rank) for rank in range(4)] == [range(4), range(4, 8)] * 2
    assert placement.experts_of(6) == range(3, 5)
    assert [placement.members(rank) for rank in (0, 3, 4, 7)] == [range(4), range(4), range(4, 8), range(4, 8)]


def test_more_places_than_experts_leave_some_empty() -> None:
    placement = Placement.spread(2, 4, ep=3)
    assert [len(placement.experts_of(rank)) for rank in range(3)] == [1, 1, 0]
    assert placement.piece("up", torch.zeros(0, WIDTH, 4), 2).boxes == []


def test_a_piece_says_where_it_stands() -> None:
    placement = Placement.spread(4, 6, ep=2, tp=2)
    part = torch.zeros(2, 3, WIDTH)
    piece = placement.piece("down", part, 3)
    assert piece.shape == (4, 6, WIDTH)
    assert [offset for offset, _ in piece.boxes] == [(2, 3, 0)]
