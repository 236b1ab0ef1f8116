"""What several ranks' states say together: losses of the batch, and who sent how much to whom."""

import pytest

from distlab.live.state import curves, matrix
from tests.live.states import state

pytestmark = pytest.mark.timeout(60)


def test_a_loss_is_the_sum_of_all_shares_at_steps_that_all_have_noted() -> None:
    states = {
        0: state(0, losses={"ring": [[0, 1.0], [2, 0.5], [4, 0.25]], "flat": [[0, 9.0]]}),
        1: state(1, losses={"ring": [[0, 2.0], [2, 1.5]], "flat": [[0, None]]}),
        2: state(2),  # a stage that sees no loss
    }
    assert curves(states) == {"ring": [[0, 3.0], [2, 2.0]], "flat": [[0, None]]}


A, B, C = (["10.0.0.1", 500], ["10.0.0.2", 500], ["10.0.0.3", 500])


def test_a_peer_is_named_by_both_ends_of_a_connection() -> None:
    """Local ranks share an address, and a port may be that of two connections that lead to different places."""
    states = {
        0: state(0, sent=[[A, B, 100], [A, C, 30], [["10.0.0.1", 501], B, 5]]),
        1: state(1, sent=[[B, A, 7], [B, ["10.0.0.1", 501], 1], [B, ["10.0.0.9", 29500], 1000]]),
        2: state(2, sent=[[C, A, 2]]),
    }
    assert matrix(states, 3) == [[None, 105, 30], [8, None, 0], [2, 0, None]]


def test_a_rank_that_measures_nothing_has_no_numbers() -> None:
    states = {0: state(0, unmeasured="no counters here"), 1: state(1, sent=[[B, A, 7]])}
    assert matrix(states, 3) == [[None] * 3] * 3
