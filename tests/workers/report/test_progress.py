"""Progress: a bar on a terminal, few lines in a log, silence when the work is short."""

import io

import pytest

from workers.report.journal import Journal
from workers.report.progress import Progress, working


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_log_gets_at_most_a_line_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    said: list[str] = []
    monkeypatch.setattr("workers.report.progress.time.monotonic", lambda: now)
    with Progress(50, "measured", said.append, io.StringIO()) as shown:
        for _ in range(50):
            now += 0.1
            shown.advance()
    assert 4 <= len(said) <= 5
    assert said[0].startswith("measured   1") and said[0].endswith(" of 50")


def test_short_work_says_nothing() -> None:
    said: list[str] = []
    with Progress(1000, "measured", said.append, io.StringIO()) as shown:
        shown.advance(1000)
    assert said == [] and shown.done == 1000


def test_a_terminal_gets_a_bar_and_the_log_nothing() -> None:
    said: list[str] = []
    terminal = Terminal()
    with Progress(3, "measured", said.append, terminal) as shown:
        shown.advance(3)
    assert "measured" in terminal.getvalue() and "0/3" in terminal.getvalue()
    assert said == []


def test_what_is_not_shown_is_silent_everywhere() -> None:
    terminal = Terminal()
    with Progress(3, "measured", pytest.fail, terminal, shown=False) as shown:
        shown.advance(3)
    assert terminal.getvalue() == ""


def test_a_quiet_run_says_where_it_is(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    now = 100.0
    monkeypatch.setattr("workers.report.progress.time.monotonic", lambda: now)
    monkeypatch.setattr("workers.report.progress.time.time", lambda: 5000.0 + now)
    journal, seen = Journal(), []
    for second in range(46):
        now = 100.0 + second
        if second == 15:
            journal.say("something else")
        working(journal, 5094.0, 2, "proof of ring")
        seen += [(second, line) for line in capsys.readouterr().out.splitlines()]
    assert [second for second, _ in seen] == [10, 15, 25, 35, 45]
    assert seen[0][1] == "working    proof of ring, step 2 (16 s since the start)"
