"""Who is lost, from who hears whom, when a break counts and who says it; for whom a rank waits, and where it is."""

import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest
from msgspec.structs import asdict

from distlab.cluster import failure_detector, name_ranks
from distlab.cluster.failure_detector import (
    FOLLOW_S,
    SETTLE_S,
    SLOW_AGAIN_S,
    SLOW_S,
    FailureDetector,
    MainThreadProgress,
    Slowness,
    diagnose,
    lost_ranks,
)
from distlab.cluster.heartbeat import Hearing, LastReport, RunPosition, Verdict
from distlab.cluster.heartbeat_helper import PERIOD_S
from distlab.report.records import Lost

SIZES = range(2, 9)


def whole(world_size: int) -> dict[int, set[int]]:
    return {rank: set(range(world_size)) for rank in range(world_size)}


def seen(world_size: int, memory_share: float | None = None) -> dict[int, LastReport]:
    return {rank: LastReport(17, "all_reduce", memory_share, 2.6) for rank in range(world_size)}


@pytest.mark.parametrize("world_size", range(1, 9))
def test_nobody_is_lost_in_a_whole_cluster(world_size: int) -> None:
    assert lost_ranks(whole(world_size), set(range(world_size))) == frozenset()


@pytest.mark.parametrize("world_size", SIZES)
def test_a_silent_rank_is_lost_for_every_survivor(world_size: int) -> None:
    for dead in range(world_size):
        hears = {rank: heard - {dead} for rank, heard in whole(world_size).items() if rank != dead}
        assert lost_ranks(hears, set(range(world_size))) == {dead}


@pytest.mark.parametrize("world_size", range(3, 9))
def test_a_rank_is_lost_while_only_some_have_noticed(world_size: int) -> None:
    for dead, first in itertools.permutations(range(world_size), 2):
        hears = whole(world_size)
        hears[first] -= {dead}
        assert lost_ranks(hears, set(range(world_size))) == {dead}


@pytest.mark.parametrize("world_size", range(3, 9))
def test_of_a_broken_link_the_higher_end_is_lost_and_both_are_named(world_size: int) -> None:
    for low, high in itertools.combinations(range(world_size), 2):
        hears = whole(world_size)
        hears[low] -= {high}
        hears[high] -= {low}
        verdict = diagnose(hears, set(range(world_size)), seen(world_size))
        assert verdict is not None
        assert [lost.rank for lost in verdict.lost] == [high]
        assert f"rank {low} and rank {high} lost heartbeats from each other" in verdict.sentence
        assert "at step 17 in all_reduce" in verdict.sentence


@pytest.mark.parametrize("world_size", SIZES)
def test_a_split_names_the_smaller_side_on_both_and_halves_name_each_other(world_size: int) -> None:
    everyone = set(range(world_size))
    for size in range(1, world_size):
        one, other = set(range(size)), set(range(size, world_size))
        verdicts = [lost_ranks(dict.fromkeys(side, side), everyone) for side in (one, other)]
        if len(one) == len(other):
            assert verdicts == [other, one]
        else:
            smaller = min(one, other, key=len)
            assert verdicts == [smaller, smaller]


def test_a_cut_off_rank_says_so_of_itself() -> None:
    verdict = diagnose({2: {2}}, {0, 1, 2}, seen(3))
    assert verdict is not None
    assert (
        verdict.sentence
        == "rank 2 is partitioned from the cluster at step 17 in all_reduce: no heartbeat from ranks 0 and 1 for 2.6 s"
    )


def test_two_bad_links_cost_the_rank_that_has_both() -> None:
    hears = whole(4)
    hears[0] -= {1, 2}
    hears[1] -= {0}
    hears[2] -= {0}
    assert lost_ranks(hears, set(range(4))) == {0}


@pytest.mark.parametrize(("share", "named"), [(0.97, True), (0.5, False), (None, False)])
def test_memory_near_its_limit_is_named_as_the_cause(share: float | None, named: bool) -> None:
    verdict = diagnose({0: {0}}, {0, 1}, seen(2, share))
    assert verdict is not None
    assert ("97% of its limit" in verdict.sentence) is named
    assert verdict.lost[0].step == 17


def test_a_verdict_survives_the_wire() -> None:
    verdict = diagnose({0: {0}}, {0, 1}, seen(2))
    assert verdict is not None
    assert Verdict.from_json(verdict.to_json() | {"lost": [asdict(lost) for lost in verdict.lost]}) == verdict


def test_ranks_are_named_in_words() -> None:
    assert [name_ranks(ranks) for ranks in ([2], [3, 1], {0, 1, 2})] == ["rank 2", "ranks 1 and 3", "ranks 0, 1 and 2"]


def test_ranks_that_the_kernel_killed_are_named_even_by_one_survivor_of_many() -> None:
    last = seen(4)
    last |= {rank: replace(last[rank], killed=True) for rank in (1, 3)}
    verdict = diagnose({0: {0}, 2: {2}}, {0, 1, 2, 3}, last)
    assert verdict is not None
    assert [lost.rank for lost in verdict.lost] == [1, 3]
    assert verdict.sentence.count("killed by the OOM killer") == 2
    alone = diagnose({0: {0}}, {0, 1, 2, 3}, last | {2: replace(last[2], killed=True)})
    assert alone is not None
    assert [lost.rank for lost in alone.lost] == [1, 2, 3]


LOST_AFTER_S = 2.5
BREAK = Verdict(3, "rank 2 lost", (Lost(2, 0, "silent"),))


class Tables:
    """What a rank of three hears of the others."""

    peers = (1, 2)

    def hears(self, _now: float) -> dict[int, set[int]]:
        return {0: {0, 1}, 1: {0, 1}}

    def present(self) -> set[int]:
        return {0, 1, 2}

    def seen(self, _place: RunPosition, _now: float) -> None:
        return None

    def counts(self) -> dict[int, int]:
        return {1: 7, 2: 7}


def judging_on(rank: int, monkeypatch: pytest.MonkeyPatch, found: list[Verdict | None]) -> FailureDetector:
    monkeypatch.setattr(failure_detector, "diagnose", lambda *_: found.pop(0))
    hearing: Hearing = Tables()  # type: ignore[assignment]
    return FailureDetector(rank, hearing)


def test_the_lowest_speaks_when_all_tables_show_it_and_the_others_later(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = [10.0, 10.0 + SETTLE_S, 10.0 + SETTLE_S + FOLLOW_S]
    for rank, spoken in ((0, [None, BREAK, BREAK]), (1, [None, None, BREAK])):
        one = judging_on(rank, monkeypatch, [BREAK] * 3)
        assert [one.verdict(RunPosition(), now) for now in moments] == spoken


def test_a_break_that_heals_counts_from_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    one = judging_on(0, monkeypatch, [BREAK, None, BREAK, BREAK])
    assert [one.verdict(RunPosition(), now) for now in (10.0, 10.5, 11.0, 11.0 + SETTLE_S)] == [None, None, None, BREAK]


def test_what_was_acted_on_is_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    one = judging_on(0, monkeypatch, [BREAK, BREAK])
    one.verdict(RunPosition(), 10.0)
    one.settled()
    assert one.verdict(RunPosition(), 11.0) is None


@pytest.mark.parametrize("late_s", [0.0, 0.75, 1.0])
def test_a_rank_that_was_killed_is_not_called_alive_by_a_watch_that_was_late(late_s: float) -> None:
    """Rank 2 of three beats last at 2 s; rank 0 looks at that beat so much later, and looks at nothing until then."""
    first, second, third = hearings = [Hearing(rank, range(3), LOST_AFTER_S, 0.0) for rank in range(3)]
    judges = [FailureDetector(rank, hearing) for rank, hearing in enumerate((first, second))]
    spoken: list[tuple[float, Verdict]] = []
    for tick in range(30):
        now = tick * PERIOD_S
        beats = [one.beat(RunPosition(), None, min(now, 2.0) if one is third else now) for one in hearings]
        first_looks = not 2.0 < now < 2.0 + late_s
        if first_looks:
            first.take(beats[1], now)
        if first_looks and now <= 2.0 + late_s:
            first.take(beats[2], now)
        if now <= 2.0:
            second.take(beats[2], now)
        second.take(beats[0], now)
        spoken += [(now, verdict) for one in judges if (verdict := one.verdict(RunPosition(), now))]
    first_s, verdict = spoken[0]
    assert [lost.rank for lost in verdict.lost] == [2]
    assert "no heartbeat for" in verdict.sentence
    assert first_s <= 2.0 + LOST_AFTER_S + SETTLE_S + FOLLOW_S + 2 * PERIOD_S


def test_a_link_between_two_that_live_is_named_once_both_have_beaten() -> None:
    hearings = [Hearing(rank, range(3), LOST_AFTER_S, 0.0) for rank in range(3)]
    judge = FailureDetector(0, hearings[0])
    spoken = []
    for tick in range(30):
        now = tick * PERIOD_S
        beats = [one.beat(RunPosition(), None, now) for one in hearings]
        for a, b in ((0, 1), (1, 0), (0, 2), (2, 0), (1, 2), (2, 1)):
            if now <= 2.0 or {a, b} != {1, 2}:
                hearings[b].take(beats[a], now)
        spoken += [(now, verdict) for verdict in [judge.verdict(RunPosition(), now)] if verdict]
    first_s, verdict = spoken[0]
    assert "rank 1 and rank 2 lost heartbeats from each other, though both are alive" in verdict.sentence
    assert first_s <= 2.0 + LOST_AFTER_S + SETTLE_S + 2 * PERIOD_S


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


def test_a_wait_for_others_is_no_work() -> None:
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
    main.together = False
    main.at(1, "forward")
    assert (main.place.turn, main.place.step) == (2, 1)


def test_collectives_are_counted_from_where_it_came_to_this_place() -> None:
    main, group = MainThreadProgress(), SimpleNamespace(begun=7)
    group._get_sequence_number_for_group = lambda: group.begun
    main.follow(group)  # type: ignore[arg-type]
    main.at(0, "backward")
    group.begun = 9
    assert main.here().calls == 2
