"""Lost ranks and their sentences, waits for slow ranks, and a rank's place, all with an artificial clock."""

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
    """The failure detector of rank 0 for three ranks whose heartbeats a test controls."""

    def __init__(self, size: int = 3) -> None:
        self.detector = FailureDetector(0, range(size), LOST_AFTER_S, 0.0)
        for state in self.detector.ranks.values():
            state.place = THERE

    def heartbeat(self, now: float, *ranks: int) -> None:
        for rank in ranks:
            self.detector.ranks[rank].last_heartbeat_at = now

    def sentence(self, now: float) -> str:
        """Return the sentence of the verdict; empty if there is none yet."""
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
def test_an_ended_connection_is_a_loss_with_its_reason(change: dict[str, object], reason: str) -> None:
    cluster = Cluster()
    for name, value in change.items():
        setattr(cluster.detector.ranks[2], name, value)
    cluster.detector.ranks[2].ended_at = 1.0
    assert cluster.sentence(1.0) == ""
    assert cluster.sentence(1.0 + SETTLE_S) == f"rank 2 lost at step 17 in all_reduce: {reason}"
    verdict = cluster.detector.verdict(1.0 + SETTLE_S)
    assert verdict is not None and verdict.exit_code == 3
    assert [(entry.rank, entry.step, entry.reason) for entry in verdict.lost] == [(2, 17, reason)]


def test_ranks_lost_within_half_a_second_are_named_together() -> None:
    cluster = Cluster(4)
    cluster.detector.ranks[3].ended_at = 1.0
    assert cluster.sentence(1.0) == ""
    cluster.detector.ranks[1].ended_at = 1.0 + SETTLE_S - 0.1
    words = "at step 17 in all_reduce: its connection ended"
    assert cluster.sentence(1.0 + SETTLE_S) == f"rank 1 lost {words}; rank 3 lost {words}"
    cluster.detector.forget([1, 3])
    cluster.heartbeat(2.0, 0, 2)
    assert cluster.sentence(9.9) == "" or "no heartbeat" in cluster.sentence(9.9), (
        "a handled loss is not reported again"
    )
    assert set(cluster.detector.ranks) == {0, 2}


def test_a_silent_rank_is_lost_after_the_timeout_and_not_before() -> None:
    cluster = Cluster()
    cluster.heartbeat(10.0, 0, 1, 2)
    cluster.heartbeat(12.4, 0, 1)
    assert cluster.sentence(12.5) == "" == cluster.sentence(12.6)
    assert cluster.sentence(12.6 + SETTLE_S) == "rank 2 lost at step 17 in all_reduce: no heartbeat for 2.5 s"


def test_a_heartbeat_restarts_the_timeout() -> None:
    cluster = Cluster()
    cluster.heartbeat(10.0, 0, 1)
    assert cluster.sentence(2.6 + 10) == ""
    cluster.heartbeat(12.7, 0, 1, 2)
    assert cluster.sentence(13.2) == ""
    cluster.heartbeat(15.0, 0, 1)
    assert cluster.sentence(15.3) == "", "the settling time starts again"


def test_a_rank_that_left_is_not_lost_and_a_freeze_restarts_timeouts() -> None:
    cluster = Cluster()
    cluster.detector.ranks[2].left, cluster.detector.ranks[2].ended_at = True, 1.0
    cluster.heartbeat(9.0, 0, 1)
    assert cluster.sentence(9.0) == "" == cluster.sentence(10.0)
    cluster = Cluster()
    cluster.detector.restart_timeouts(9.0)
    assert cluster.sentence(10.0) == "" == cluster.sentence(11.0)


def test_rank_0_is_partitioned_if_all_others_are_silent_and_connected() -> None:
    cluster = Cluster()
    cluster.heartbeat(9.0, 0)
    assert cluster.sentence(9.0) == ""
    assert (
        cluster.sentence(9.6)
        == "rank 0 is partitioned from the cluster at step 17 in all_reduce: no heartbeat from ranks 1 and 2"
    )
    cluster.detector.ranks[1].ended_at = 5.0
    assert cluster.sentence(9.7).startswith("rank 1 lost"), "an ended connection proves a loss"
    pair = Cluster(2)
    pair.heartbeat(9.0, 0)
    assert pair.sentence(9.0) == "" and pair.sentence(9.6).startswith("rank 1 lost"), (
        "a single silent rank does not prove that rank 0 is partitioned"
    )


def test_names_of_several_ranks() -> None:
    assert [name_ranks(ranks) for ranks in ([3], [2, 1], [0, 1, 4])] == ["rank 3", "ranks 1 and 2", "ranks 0, 1 and 4"]


HERE = Place(turn=5, step=2, phase="all_reduce", calls=1)
BEHIND = {1: Place(turn=3, step=1, phase="forward", in_phase_s=14.0)}
LEVEL = {1: Place(turn=5, step=2, phase="all_reduce", calls=1)}


def test_a_rank_with_fewer_turns_or_collectives_is_behind() -> None:
    others = {1: replace(HERE, turn=4, calls=9), 2: replace(HERE, calls=0), 3: HERE, 4: replace(HERE, turn=6, calls=0)}
    assert sorted(waited_for(HERE, others)) == [1, 2]
    assert behind(HERE, others, skip=[1]) == ["rank 2 (at step 2 in all_reduce for 0.0 s)"]


def test_a_wait_is_reported_after_3_s_and_again_after_5_s() -> None:
    slowness = Slowness(0.0)
    slowness.sentence(HERE, BEHIND, 10.0)  # it has just arrived here
    reported = {second: slowness.sentence(HERE, BEHIND, second) for second in (12.9, 13.0, 13.5, 18.0)}
    assert [bool(sentence) for sentence in reported.values()] == [False, True, False, True]
    assert reported[13.0] == "waiting for 3.0 s at step 2 in all_reduce for rank 1 (at step 1 in forward for 14.0 s)"
    assert (SLOW_S, SLOW_AGAIN_S) == (3.0, 5.0)


def test_no_wait_is_reported_if_no_rank_is_behind_or_this_one_moves() -> None:
    slowness = Slowness(0.0)
    assert slowness.sentence(HERE, LEVEL, 10.0) == ""
    moving = [slowness.sentence(Place(turn=10 + second), BEHIND, 20.0 + second) for second in range(8)]
    assert moving == [""] * 8


def waiting(others: dict[int, Place], seconds: int) -> list[int]:
    """Return when a rank at a barrier reports its wait, while the others do not move."""
    slowness, here = Slowness(100.0), Place(turn=4, phase="the wait at one process")
    return [now for now in range(seconds) if slowness.sentence(here, others, 100.0 + now)]


@pytest.mark.parametrize(
    ("phases", "reported"),
    [
        (["one process"], []), (["report"], []), (["one process, to audit flat"], []), (["forward"], [3, 8]),
        (["the wait at one process"], [3, 8]), (["one process", "one process"], []),
        (["one process", "one process", "forward"], [3, 8]),
        (["one process", "one process", "one process"], [3, 8]),  # rank 2 has nothing to compute there
    ],
)  # fmt: skip
def test_waits_for_serial_work_of_ranks_0_and_1_are_not_reported(phases: list[str], reported: list[int]) -> None:
    assert waiting({rank: Place(turn=3, phase=phase) for rank, phase in enumerate(phases)}, 12) == reported


def test_a_wait_is_reported_if_it_is_longer_than_normal() -> None:
    """This rank's own step took 4 s on busy cores, so the step of another may take 8 s."""
    slowness = Slowness(0.0)
    for now in (10.0, 12.0, 14.0):
        assert slowness.sentence(Place(turn=5, phase="backward"), {1: Place(turn=5)}, now) == ""
    waits = Place(turn=6, step=2, phase="the wait at loss")
    assert [now for now in range(14, 32) if slowness.sentence(waits, {1: Place(turn=5)}, float(now))] == [22, 27]


@pytest.mark.parametrize("phase", ["all_reduce", "one process"])
def test_waits_and_serial_phases_do_not_count_as_work(phase: str) -> None:
    slowness, others = Slowness(0.0), {1: Place(turn=3 if phase == "all_reduce" else 5)}
    slowness.sentence(replace(HERE, phase=phase), others, 1.0)
    slowness.sentence(replace(HERE, phase=phase), others, 2.0)
    slowness.sentence(Place(turn=6), others, 40.0)
    assert slowness.sentence(Place(turn=6), others, 43.0)


def test_a_wait_does_not_change_the_work_of_the_main_thread() -> None:
    main = MainThreadProgress()
    main.at(3, "proof of ring")
    with main.waiting("loss"):
        assert (main.place.phase, main.work) == ("the wait at loss", (3, "proof of ring"))
    assert (main.place.phase, main.work) == ("proof of ring", (3, "proof of ring"))


def test_turns_are_counted_while_ranks_change_place_together() -> None:
    main = MainThreadProgress()
    main.at(0, "forward")
    main.at(0, "backward")
    assert main.place.turn == 2
    main.use_own_pace()
    main.at(1, "forward")
    assert (main.place.turn, main.place.step) == (0, 1)


def test_collectives_are_counted_from_the_last_change_of_place() -> None:
    main, group = MainThreadProgress(), SimpleNamespace(begun=7)
    group._get_sequence_number_for_group = lambda: group.begun
    main.follow(group)  # type: ignore[arg-type]
    main.at(0, "backward")
    group.begun = 9
    assert main.here().calls == 2
