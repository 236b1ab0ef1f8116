"""A rank on its way in: when it takes rank 0 for lost, from the answers that it had."""

import time
from types import SimpleNamespace
from typing import Any

import pytest

from distlab.cluster import ClusterError
from distlab.cluster.rendezvous_client import RendezvousClient


def looked(answer: dict[str, Any] | None, let_in_ago_s: float | None, asked_ago_s: float = 0.2) -> float | None:
    """What a rank knows after `answer`, whom rank 0 last answered so long ago."""
    now = time.monotonic()
    arrival: Any = SimpleNamespace(config=SimpleNamespace(lost_after_s=2.5))
    let_in_at = None if let_in_ago_s is None else now - let_in_ago_s
    return RendezvousClient._look_at_rank_0(arrival, answer, let_in_at, now - asked_ago_s)


def test_a_rank_0_that_had_let_this_rank_in_and_answers_no_more_is_lost() -> None:
    assert looked(None, 2.0) is not None
    with pytest.raises(ClusterError, match="rank 0 lost before all ranks had joined: no answer for"):
        looked(None, 2.6)


def test_a_rank_that_was_frozen_itself_gives_it_time() -> None:
    known = looked(None, 9.0, asked_ago_s=8.0)
    assert known is not None and time.monotonic() - known < 1.0


@pytest.mark.parametrize("wait", ["waiting for ranks 1 and 3", "waiting for rank 2", ""])
def test_who_waits_with_the_board_is_let_in(wait: str) -> None:
    assert looked({"wait": wait}, None) is not None


@pytest.mark.parametrize(
    "wait", ["waiting for the end of an earlier run, which", "waiting for the earlier rank 1 to respond"]
)
def test_who_waits_for_an_earlier_run_to_end_is_not(wait: str) -> None:
    known = looked({"wait": wait}, 1.0)
    assert known is None, "that run may end, and this rank is to wait for the next rank 0"
    assert looked(None, None) is None
