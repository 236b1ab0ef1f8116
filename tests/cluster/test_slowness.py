"""When a rank says for whom it waits: not at once, not again and again, and not while it goes on itself."""

from distlab.cluster.failure_detector import SLOW_AGAIN_S, SLOW_S, Slowness
from distlab.cluster.heartbeat import Hearing, RunPosition

HERE = RunPosition(turn=5, step=2, phase="all_reduce", calls=1)


def hearing(turn: int) -> Hearing:
    """Rank 0's, of a rank 1 that has changed place so often, as it said at second 0."""
    hearings = [Hearing(rank, range(2), 2.5, 0.0) for rank in (0, 1)]
    hearings[0].take(hearings[1].beat(RunPosition(turn, 1, "forward", since=-1.0), None, 0.0), 0.0)
    return hearings[0]


def test_who_is_behind_is_named_after_a_while_and_then_now_and_again() -> None:
    slowness, behind = Slowness(0.0), hearing(turn=3)
    slowness.sentence(behind, HERE, 10.0)  # it has come here just now
    said = {second: slowness.sentence(behind, HERE, second) for second in (12.9, 13.0, 13.5, 18.0)}
    assert [bool(sentence) for sentence in said.values()] == [False, True, False, True]
    assert said[13.0] == (
        # 1 s when it spoke at 0
        "waiting for 3.0 s at step 2 in all_reduce for rank 1 (at step 1 in forward for 14.0 s)"
    )
    assert (SLOW_S, SLOW_AGAIN_S) == (3.0, 5.0)


def test_nothing_is_said_where_nobody_is_behind_or_this_rank_goes_on() -> None:
    slowness = Slowness(0.0)
    assert slowness.sentence(hearing(turn=5), HERE, 10.0) == ""
    going = [slowness.sentence(hearing(turn=3), RunPosition(turn=10 + second), 20.0 + second) for second in range(8)]
    assert going == [""] * 8


def waiting_for_rank_0(phase: str, seconds: int) -> list[int]:
    """When rank 1, which came to a barrier at second 100, says that it waits for rank 0, in `phase` all the while."""
    here, there = (Hearing(rank, range(2), 2.5, 100.0) for rank in (1, 0))
    slowness, said = Slowness(100.0), []
    for second in range(seconds):
        now = 100.0 + second
        here.take(there.beat(RunPosition(3, 0, phase), None, now), now)
        if slowness.sentence(here, RunPosition(4, 0, "the wait at one process"), now):
            said.append(second)
    return said


def test_what_rank_0_does_alone_is_waited_for_in_silence() -> None:
    assert waiting_for_rank_0("one process", 60) == []
    assert waiting_for_rank_0("report", 60) == []
    assert waiting_for_rank_0("one process, to audit flat", 60) == []
    assert waiting_for_rank_0("forward", 12) == [3, 8]
    assert waiting_for_rank_0("the wait at one process", 12) == [3, 8]


def test_the_twin_of_the_one_process_is_waited_for_in_silence_and_whoever_is_late_beside_it_is_named() -> None:
    """Rank 3 waits for ranks 0 and 1, which compute the one process and its twin, and for rank 2, which is nowhere."""
    hearings = [Hearing(rank, range(4), 2.5, 0.0) for rank in range(4)]
    here, waits = hearings[3], RunPosition(4, 0, "the wait at one process")

    def said(phases: list[str]) -> str:
        slowness = Slowness(0.0)
        for rank, phase in enumerate(phases):
            here.take(hearings[rank].beat(RunPosition(3 if phase else 4, 0, phase), None, 1.0), 1.0)
        slowness.sentence(here, waits, 1.0)
        return slowness.sentence(here, waits, 9.0)

    assert said(["one process", "one process", ""]) == ""
    assert "for rank 2 (" in said(["one process", "one process", "forward"])
    assert "for rank 2 (" in said(["one process", "one process", "one process"])  # it has nothing to compute there


def test_a_wait_is_named_once_it_is_longer_than_what_is_normal_here() -> None:
    """This rank's own step took 4 s on busy cores: a wait of 8 s is what another's step may take."""
    slowness, level = Slowness(0.0), hearing(turn=5)
    for now in (10.0, 12.0, 14.0):
        assert (
            slowness.sentence(level, RunPosition(turn=5, phase="backward"), now) == ""
        )  # it works, and nobody is behind
    waits = RunPosition(turn=6, step=2, phase="the wait at loss")
    assert [now for now in range(14, 32) if slowness.sentence(level, waits, float(now))] == [22, 27]


def test_time_in_a_wait_is_no_work() -> None:
    slowness, late = Slowness(0.0), hearing(turn=3)
    slowness.sentence(late, HERE, 1.0)
    slowness.sentence(late, HERE, 2.0)
    slowness.sentence(late, RunPosition(turn=6), 40.0)
    assert slowness.sentence(late, RunPosition(turn=6), 43.0)


def test_what_rank_0_does_alone_makes_no_wait_for_others_normal() -> None:
    alone = RunPosition(turn=5, step=0, phase="one process")
    slowness, level = Slowness(0.0), hearing(turn=5)
    slowness.sentence(level, alone, 1.0)
    slowness.sentence(level, alone, 30.0)
    slowness.sentence(level, RunPosition(turn=6), 31.0)
    assert slowness.sentence(level, RunPosition(turn=6), 34.0)
