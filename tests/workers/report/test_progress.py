"""Progress: a bar on a terminal, few lines in a log, silence when the work is short."""

import io

import pytest

from workers.report.progress import Progress


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
