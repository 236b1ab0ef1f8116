"""A break counts once it has stood, and the lowest survivor speaks first."""

import pytest

from workers.cluster import judging
from workers.cluster.heartbeat import Hearing, Place
from workers.cluster.judging import FOLLOW_S, SETTLE_S, Judging
from workers.cluster.verdict import Verdict
from workers.report.records import Lost

BREAK = Verdict(3, "rank 2 lost", (Lost(2, 0, "silent"),))


class Tables:
    """What a rank of three hears of the others."""

    peers = (1, 2)

    def hears(self, _now: float) -> dict[int, set[int]]:
        return {0: {0, 1}, 1: {0, 1}}

    def present(self) -> set[int]:
        return {0, 1, 2}

    def seen(self, _place: Place, _now: float) -> None:
        return None


def judging_on(rank: int, monkeypatch: pytest.MonkeyPatch, found: list[Verdict | None]) -> Judging:
    monkeypatch.setattr(judging, "condemn", lambda *_: found.pop(0))
    hearing: Hearing = Tables()  # type: ignore[assignment]
    return Judging(rank, hearing)


def test_the_lowest_speaks_when_all_tables_show_it_and_the_others_later(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = [10.0, 10.0 + SETTLE_S, 10.0 + SETTLE_S + FOLLOW_S]
    for rank, spoken in ((0, [None, BREAK, BREAK]), (1, [None, None, BREAK])):
        one = judging_on(rank, monkeypatch, [BREAK] * 3)
        assert [one.verdict(Place(), now) for now in moments] == spoken


def test_a_break_that_heals_counts_from_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    one = judging_on(0, monkeypatch, [BREAK, None, BREAK, BREAK])
    assert [one.verdict(Place(), now) for now in (10.0, 10.5, 11.0, 11.0 + SETTLE_S)] == [None, None, None, BREAK]


def test_what_was_acted_on_is_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    one = judging_on(0, monkeypatch, [BREAK, BREAK])
    one.verdict(Place(), 10.0)
    one.settled()
    assert one.verdict(Place(), 11.0) is None
