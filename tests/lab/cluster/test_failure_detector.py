"""Which ranks are lost and in what words, for whom a rank waits, and where it is: with a clock that is handed in."""

from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from distlab.lab.cluster import name_ranks
from distlab.lab.cluster.failure_detector import (
    SETTLE_S,
    SLOW_AGAIN_S,
    SLOW_S,
    FailureDetector,
    MainThreadProgress,
    Slowness,
    behind,
    waited_for,
)
from distlab.lab.cluster.messages import Place

LOST_AFTER_S = 2.5
THERE = Place(17, "all_reduce")


class Cluster:
    """Three ranks that beat until something is done to them, and what the server of rank 0 makes of it."""

    def __init__(self, size: int = 3) -> None:
        self.detector = FailureDetector(0, range(size), LOST_AFTER_S, 0.0)
        for state in self.detector.ranks.values():
            state.place = THERE

    def beat(self, now: float, *ranks: int) -> None:
        for rank in ranks:
            self.detector.ranks[rank].heard_at = now

    def said(self, now: float) -> str:
        """The sentence, or nothing yet."""
        verdict = self.detector.verdict(now)
        return verdict.sentence if verdict else ""


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, "its connection ended"),
        ({"how": "killed by SIGKILL"}, "killed by SIGKILL"),
        ({"place": replace(THERE, memory=0.84)}, "its connection ended"),
        ({"place": replace(THERE, memory=0.85)}, "its connection ended, with memory at 85% of its limit in the last heartbeat:"
         " probably killed by the OOM killer"),
    ],
)  # fmt: skip
def test_a_connection_that_ends_is_a_death_with_its_reason(change: dict[str, object], reason: str) -> None:
    cluster = Cluster()
    for name, value in change.items():
        setattr(cluster.detector.ranks[2], name, value)
    cluster.detector.ranks[2].ended_at = 1.0
    assert cluster.said(1.0) == ""
    assert cluster.said(1.0 + SETTLE_S) == f"rank 2 lost at step 17 in all_reduce: {reason}"
    verdict = cluster.detector.verdict(1.0 + SETTLE_S)
    assert verdict is not None and verdict.exit_code == 3
    assert [(entry.rank, entry.step, entry.reason) for entry in verdict.lost] == [(2, 17, reason)]


def test_all_that_are_lost_within_half_a_second_are_named_together() -> None:
    cluster = Cluster(4)
    cluster.detector.ranks[3].ended_at = 1.0
    assert cluster.said(1.0) == ""
    cluster.detector.ranks[1].ended_at = 1.0 + SETTLE_S - 0.1
    words = "at step 17 in all_reduce: its connection ended"
    assert cluster.said(1.0 + SETTLE_S) == f"rank 1 lost {words}; rank 3 lost {words}"
    cluster.detector.forget([1, 3])
    cluster.beat(2.0, 0, 2)
    assert cluster.said(9.9) == "" or "no heartbeat" in cluster.said(9.9), "what was acted on is not said again"
    assert set(cluster.detector.ranks) == {0, 2}


def test_a_silent_rank_is_lost_after_its_bound_and_not_before() -> None:
    cluster = Cluster()
    cluster.beat(10.0, 0, 1, 2)
    cluster.beat(12.4, 0, 1)
    assert cluster.said(12.5) == "" == cluster.said(12.6)
    assert cluster.said(12.6 + SETTLE_S) == "rank 2 lost at step 17 in all_reduce: no heartbeat for 2.5 s"


def test_a_silence_that_ends_counts_from_anew() -> None:
    cluster = Cluster()
    cluster.beat(10.0, 0, 1)
    assert cluster.said(2.6 + 10) == ""
    cluster.beat(12.7, 0, 1, 2)
    assert cluster.said(13.2) == ""
    cluster.beat(15.0, 0, 1)
    assert cluster.said(15.3) == "", "and settles anew"


def test_who_has_left_is_no_loss_and_a_freeze_of_this_process_forgives() -> None:
    cluster = Cluster()
    cluster.detector.ranks[2].left, cluster.detector.ranks[2].ended_at = True, 1.0
    cluster.beat(9.0, 0, 1)
    assert cluster.said(9.0) == "" == cluster.said(10.0)
    cluster = Cluster()
    cluster.detector.forgive(9.0)
    assert cluster.said(10.0) == "" == cluster.said(11.0)


def test_where_rank_0_hears_nobody_though_no_connection_has_ended_it_is_the_one_cut_off() -> None:
    cluster = Cluster()
    cluster.beat(9.0, 0)
    assert cluster.said(9.0) == ""
    assert (
        cluster.said(9.6)
        == "rank 0 is partitioned from the cluster at step 17 in all_reduce: no heartbeat from ranks 1 and 2"
    )
    cluster.detector.ranks[1].ended_at = 5.0
    assert cluster.said(9.7).startswith("rank 1 lost"), "a process that has ended is gone for certain"
    pair = Cluster(2)
    pair.beat(9.0, 0)
    assert pair.said(9.0) == "" and pair.said(9.6).startswith("rank 1 lost"), "one other says nothing of this rank"


def test_ranks_are_named_in_words() -> None:
    assert [name_ranks(ranks) for ranks in ([3], [2, 1], [0, 1, 4])] == ["rank 3", "ranks 1 and 2", "ranks 0, 1 and 4"]


HERE = Place(turn=5, step=2, phase="all_reduce", calls=1)
BEHIND = {1: Place(turn=3, step=1, phase="forward", in_phase_s=14.0)}
LEVEL = {1: Place(turn=5, step=2, phase="all_reduce", calls=1)}


def test_behind_is_who_changed_place_or_began_collectives_less_often() -> None:
    others = {1: replace(HERE, turn=4, calls=9), 2: replace(HERE, calls=0), 3: HERE, 4: replace(HERE, turn=6, calls=0)}
    assert sorted(waited_for(HERE, others)) == [1, 2]
    assert behind(HERE, others, but=[1]) == ["rank 2 (at step 2 in all_reduce for 0.0 s)"]


def test_who_is_behind_is_named_after_a_while_and_then_now_and_again() -> None:
    slowness = Slowness(0.0)
    slowness.sentence(HERE, BEHIND, 10.0)  # it has come here just now
    said = {second: slowness.sentence(HERE, BEHIND, second) for second in (12.9, 13.0, 13.5, 18.0)}
    assert [bool(sentence) for sentence in said.values()] == [False, True, False, True]
    assert said[13.0] == "waiting for 3.0 s at step 2 in all_reduce for rank 1 (at step 1 in forward for 14.0 s)"
    assert (SLOW_S, SLOW_AGAIN_S) == (3.0, 5.0)


def test_nothing_is_said_where_nobody_is_behind_or_this_rank_goes_on() -> None:
    slowness = Slowness(0.0)
    assert slowness.sentence(HERE, LEVEL, 10.0) == ""
    going = [slowness.sentence(Place(turn=10 + second), BEHIND, 20.0 + second) for second in range(8)]
    assert going == [""] * 8


def waiting(others: dict[int, Place], seconds: int) -> list[int]:
    """When a rank that came to a barrier says for whom it waits, while the others stay where they are."""
    slowness, here = Slowness(100.0), Place(turn=4, phase="the wait at one process")
    return [now for now in range(seconds) if slowness.sentence(here, others, 100.0 + now)]


@pytest.mark.parametrize(
    ("phases", "said"),
    [
        (["one process"], []), (["report"], []), (["one process, to audit flat"], []), (["forward"], [3, 8]),
        (["the wait at one process"], [3, 8]), (["one process", "one process"], []),
        (["one process", "one process", "forward"], [3, 8]),
        (["one process", "one process", "one process"], [3, 8]),  # rank 2 has nothing to compute there
    ],
)  # fmt: skip
def test_what_ranks_0_and_1_do_alone_is_waited_for_in_silence(phases: list[str], said: list[int]) -> None:
    assert waiting({rank: Place(turn=3, phase=phase) for rank, phase in enumerate(phases)}, 12) == said


def test_a_wait_is_named_once_it_is_longer_than_what_is_normal_here() -> None:
    """This rank's own step took 4 s on busy cores: a wait of 8 s is what another's step may take."""
    slowness = Slowness(0.0)
    for now in (10.0, 12.0, 14.0):
        assert slowness.sentence(Place(turn=5, phase="backward"), {1: Place(turn=5)}, now) == ""
    waits = Place(turn=6, step=2, phase="the wait at loss")
    assert [now for now in range(14, 32) if slowness.sentence(waits, {1: Place(turn=5)}, float(now))] == [22, 27]


@pytest.mark.parametrize("phase", ["all_reduce", "one process"])
def test_time_in_a_wait_and_what_is_done_alone_is_no_work(phase: str) -> None:
    slowness, others = Slowness(0.0), {1: Place(turn=3 if phase == "all_reduce" else 5)}
    slowness.sentence(replace(HERE, phase=phase), others, 1.0)
    slowness.sentence(replace(HERE, phase=phase), others, 2.0)
    slowness.sentence(Place(turn=6), others, 40.0)
    assert slowness.sentence(Place(turn=6), others, 43.0)


def test_a_wait_for_others_is_no_work_of_the_main_thread() -> None:
    main = MainThreadProgress()
    main.at(3, "proof of ring")
    with main.waiting("loss"):
        assert (main.place.phase, main.work) == ("the wait at loss", (3, "proof of ring"))
    assert (main.place.phase, main.work) == ("proof of ring", (3, "proof of ring"))


def test_a_turn_is_counted_as_long_as_ranks_go_together() -> None:
    main = MainThreadProgress()
    main.at(0, "forward")
    main.at(0, "backward")
    assert main.place.turn == 2
    main.part()
    main.at(1, "forward")
    assert (main.place.turn, main.place.step) == (0, 1)


def test_collectives_are_counted_from_where_it_came_to_this_place() -> None:
    main, group = MainThreadProgress(), SimpleNamespace(begun=7)
    group._get_sequence_number_for_group = lambda: group.begun
    main.follow(group)  # type: ignore[arg-type]
    main.at(0, "backward")
    group.begun = 9
    assert main.here().calls == 2
