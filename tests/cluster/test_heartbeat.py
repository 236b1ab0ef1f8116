"""Tables of who hears whom, driven by hand: every rank's Hearing in one process, the links chosen by the test."""

from collections.abc import Callable

from distlab.cluster.heartbeat import Hearing, RunPosition, to_mask, to_ranks
from distlab.cluster.lost_ranks import diagnose

PERIOD_S, LOST_AFTER_S = 0.25, 2.5
Link = Callable[[int, int, float], bool]


def exchange(world_size: int, link: Link, until_s: float) -> list[Hearing]:
    """All ranks beat once a period; a beat from a to b at time t arrives if link(a, b, t)."""
    hearings = [Hearing(rank, range(world_size), LOST_AFTER_S, 0.0) for rank in range(world_size)]
    for tick in range(int(until_s / PERIOD_S) + 1):
        now = tick * PERIOD_S
        beats = [hearing.beat(RunPosition(1, 7, "all_reduce", 0.0), None, now) for hearing in hearings]
        for sender in range(world_size):
            for receiver in range(world_size):
                if sender != receiver and link(sender, receiver, now):
                    hearings[receiver].take(beats[sender], now)
    return hearings


def verdicts(hearings: list[Hearing], now: float) -> list[list[int]]:
    """Whom each rank would name at `now`."""
    found = [diagnose(one.hears(now), one.present(), one.seen(RunPosition(), now)) for one in hearings]
    return [[lost.rank for lost in verdict.lost] if verdict else [] for verdict in found]


def test_a_whole_cluster_names_nobody() -> None:
    assert verdicts(exchange(4, lambda *_: True, 10.0), 10.0) == [[], [], [], []]


def test_a_rank_has_started_once_a_beat_of_it_is_known_whoever_brought_it() -> None:
    assert exchange(3, lambda *_: False, 1.0)[0].started() == set()
    hearings = exchange(3, lambda a, b, _: {a, b} != {0, 2}, 1.0)
    assert hearings[0].started() == {1, 2}


def test_one_broken_link_is_seen_by_all_alike_though_two_ranks_do_not_hear_each_other() -> None:
    hearings = exchange(4, lambda a, b, now: now < 2 or {a, b} != {1, 3}, 6.0)
    assert verdicts(hearings, 6.0) == [[3], [3], [3], [3]]


def test_a_link_broken_one_way_costs_the_unheard_end() -> None:
    hearings = exchange(3, lambda a, b, now: now < 2 or (a, b) != (0, 2), 6.0)
    assert verdicts(hearings, 6.0) == [[0], [0], [0]]


def test_a_dead_rank_is_named_by_all_within_lost_after_and_a_period() -> None:
    hearings = exchange(4, lambda a, b, now: now < 2 or 2 not in (a, b), 4.75)
    assert [verdicts(hearings, 4.75)[rank] for rank in (0, 1, 3)] == [[2], [2], [2]]


def test_halves_name_each_other() -> None:
    hearings = exchange(4, lambda a, b, now: now < 2 or (a < 2) == (b < 2), 6.0)
    assert verdicts(hearings, 6.0) == [[2, 3], [2, 3], [0, 1], [0, 1]]


def test_a_short_silence_costs_nobody() -> None:
    hearings = exchange(3, lambda a, b, now: not 2 < now < 4 or 1 not in (a, b), 8.0)
    assert verdicts(hearings, 8.0) == [[], [], []]


def test_a_rank_that_said_goodbye_may_be_silent_and_the_news_go_round() -> None:
    hearings = exchange(3, lambda *_: True, 1.0)
    hearings[2].ended |= to_mask([2])
    hearings[1].take(hearings[2].beat(RunPosition(), None, 1.0), 1.0)  # rank 0 hears of it through rank 1 alone
    hearings[0].take(hearings[1].beat(RunPosition(), None, 1.25), 1.25)
    for tick in range(6, 60):
        now = tick * PERIOD_S
        hearings[0].take(hearings[1].beat(RunPosition(), None, now), now)
        hearings[1].take(hearings[0].beat(RunPosition(), None, now), now)
    assert verdicts(hearings[:2], 14.75) == [[], []]
    assert hearings[0].present() == {0, 1}


def test_a_rank_that_was_frozen_forgives() -> None:
    hearings = exchange(3, lambda *_: True, 1.0)
    assert verdicts(hearings, 9.0)[0]
    hearings[0].forgive(9.0)
    assert verdicts(hearings, 9.0)[0] == []


def test_behind_is_who_changed_place_or_began_collectives_less_often() -> None:
    hearings = [Hearing(rank, range(3), LOST_AFTER_S, 0.0) for rank in range(3)]
    hearings[0].take(hearings[1].beat(RunPosition(9, 4, "compute", 0.0), None, 3.0), 3.0)
    hearings[0].take(hearings[2].beat(RunPosition(10, 4, "all_reduce", 3.0), None, 3.0), 3.0)
    assert hearings[0].behind(RunPosition(10, 4, "all_reduce", 0.0), 3.5) == ["rank 1 (at step 4 in compute for 3.5 s)"]
    assert hearings[0].behind(RunPosition(9, 4, "compute", 0.0), 3.5) == []
    assert hearings[0].behind(RunPosition(9, 4, "compute", 0.0, calls=1), 3.5) != []
    hearings[0].take(hearings[1].beat(RunPosition(9, 4, "compute", 0.0, calls=1), None, 3.6), 3.6)
    assert hearings[0].behind(RunPosition(9, 4, "compute", 0.0, calls=1), 3.6) == []


def test_masks() -> None:
    assert to_ranks(to_mask([0, 3, 7])) == {0, 3, 7}
