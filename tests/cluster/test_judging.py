"""A break counts once it has stood, and the lowest survivor speaks first."""

import pytest

from distlab.cluster import failure_detector
from distlab.cluster.failure_detector import FOLLOW_S, SETTLE_S, FailureDetector
from distlab.cluster.heartbeat import Hearing, RunPosition
from distlab.cluster.heartbeat_helper import PERIOD_S
from distlab.cluster.lost_ranks import Verdict
from distlab.report.records import Lost

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
