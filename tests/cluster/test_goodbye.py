"""Goodbyes of three ranks, driven by hand: who may go when, and whom nobody waits for."""

from distlab.cluster.heartbeat import Hearing, RunPosition
from distlab.cluster.shutdown import AFTER, Goodbye

LOST_AFTER_S = 2.5


class Leaving:
    """One rank that has come to its end, or will: what it knows, and what it said."""

    def __init__(self, rank: int) -> None:
        self.said: list[str] = []
        self.hearing = Hearing(rank, range(3), LOST_AFTER_S, 0.0)
        self.goodbye = Goodbye(rank, self.hearing, self.said.append)

    def goes(self, now: float) -> bool:
        return self.goodbye.heard(now, end_by=1e9, committed=True)

    def hears(self, *others: "Leaving", now: float) -> None:
        for other in others:
            self.hearing.take(other.hearing.beat(RunPosition(), None, now), now)


def test_a_rank_goes_once_all_have_heard_its_goodbye_and_rank_0_once_it_has_theirs() -> None:
    zero, one, two = (Leaving(rank) for rank in range(3))
    assert not one.goes(1.0)
    zero.hears(one, now=1.0)
    two.hears(one, now=1.0)
    one.hears(zero, two, now=1.0)
    assert one.goes(1.0), "who goes on has heard it"
    assert not zero.goes(1.0)
    two.hears(zero, now=1.0)
    zero.hears(two, now=1.0)
    assert not zero.goes(1.0), "rank 0 waits for the goodbye of rank 2, which has heard its own"


def test_nobody_waits_for_a_rank_that_has_gone() -> None:
    zero, one, two = (Leaving(rank) for rank in range(3))
    for rank in (one, two):
        rank.goes(1.0)
    zero.hears(one, two, now=1.0)
    for rank, other in ((one, two), (two, one)):
        rank.hears(zero, other, now=1.0)
    one.hears(two, now=1.0)
    assert one.goes(1.0) and two.goes(1.0)
    zero.hears(one, two, now=1.0)  # their last beats; rank 0 still prints its verdict
    assert zero.goes(1.25), "they answer no goodbye any more"
    assert zero.said == [] and zero.goodbye.outlived == set()


def test_who_hears_of_it_by_a_third_does_not_wait_either() -> None:
    zero, one, two = (Leaving(rank) for rank in range(3))
    one.goodbye.leave()
    two.hears(one, now=1.0)
    two.goodbye.leave()
    zero.hears(two, now=1.0)
    assert zero.goes(1.25)


def test_who_falls_silent_without_a_goodbye_is_waited_for_and_named() -> None:
    zero, one, two = (Leaving(rank) for rank in range(3))
    one.goodbye.leave()
    zero.hears(one, two, now=1.0)
    assert not zero.goes(1.0 + LOST_AFTER_S)
    assert zero.goes(1.1 + LOST_AFTER_S)
    assert zero.said == [f"rank 2 lost: {AFTER}"]
    assert zero.goodbye.outlived == {2}
