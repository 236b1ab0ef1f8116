"""Progress: a heartbeat every ten seconds, on a terminal every second, with an estimate that nothing is invented for."""

import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from distlab.lab.report.progress import EVERY_S, Heartbeat, Work, announcing
from distlab.lab.report.run_folder import Journal

pytestmark = pytest.mark.timeout(20)


class Clock:
    """What time.monotonic() says; time.time() is 5000 s ahead of it."""

    now = 100.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("distlab.lab.report.progress.time.monotonic", lambda: clock.now)
    monkeypatch.setattr("distlab.lab.report.progress.time.time", lambda: 5000.0 + clock.now)
    return clock


def beats(clock: Clock, heartbeat: Heartbeat, seconds: int, each: Callable[[], object] = lambda: None) -> list[float]:
    """When a line was printed in so many seconds, looked at four times a second; `each` second something is done."""
    began, journal, printed_at = clock.now, heartbeat._journal, []
    journal.say = lambda text, at="quiet", *, kept=True: printed_at.append(clock.now)  # type: ignore[method-assign]
    for quarter in range(4 * seconds):
        clock.now = began + quarter / 4
        if quarter % 4 == 3:
            each()
        heartbeat.beat(2, "proof of ring")
    return printed_at


def test_a_line_is_there_at_least_every_ten_seconds_and_no_more(clock: Clock) -> None:
    printed_at = beats(clock, Heartbeat(Journal(), Work(), 0.0), 61)
    gaps = [later - earlier for earlier, later in zip([100.0, *printed_at], printed_at, strict=False)]
    assert len(printed_at) == 6 and max(gaps) <= 10.0 and min(gaps) >= EVERY_S


def test_a_terminal_has_a_line_every_second_and_the_log_every_ten(clock: Clock, tmp_path: Path) -> None:
    journal = Journal()
    journal.open(tmp_path, 0)
    heartbeat = Heartbeat(journal, Work(), 0.0, rewrites=True)
    printed = []
    journal.screen.shown = lambda line: printed.append(line) or ""  # type: ignore[method-assign, func-returns-value]
    for quarter in range(4 * 30):
        clock.now = 100.0 + quarter / 4
        heartbeat.beat(2, "proof of ring")
    assert len(printed) == 29 and len((tmp_path / "rank0.log").read_text().splitlines()) == 2


def test_silent_work_is_announced(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("distlab.lab.report.progress.EVERY_S", 0.05)
    with announcing("importing PyTorch"):
        time.sleep(0.3)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) >= 2 and all(re.fullmatch("starting   importing PyTorch, 0 s", line) for line in lines)
    with announcing("importing PyTorch", enabled=False):
        time.sleep(0.1)
    assert capsys.readouterr().out == ""


def test_where_nobody_knows_the_units_no_estimate_is_invented(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    heartbeat = Heartbeat(Journal(), Work(), 5094.0)
    clock.now = 110.0
    heartbeat.beat(0, "the link")
    assert capsys.readouterr().out == "working    the link, 16 s since the start, time left unknown\n"


def test_remaining_units_are_estimated_as_long_as_those_done(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    work = Work()
    heartbeat = Heartbeat(Journal(), work, 5000.0)
    with work.of(12, "steps of the proof"):
        clock.now = 130.0  # the first unit takes 30 s: imports
        work.advance()
        for _ in range(3):
            clock.now += 4.0
            work.advance()
        heartbeat.beat(0, "proof of zero3")
    (line,) = capsys.readouterr().out.splitlines()
    assert line == "working    proof of zero3 (4 of 12 steps of the proof), 42 s, about 32 s left"


def left_after(clock: Clock, done: int, total: int) -> str:
    """What is printed about the time left when so many units are done, each in a second."""
    work = Work()
    with work.of(total, "steps"):
        for _ in range(done):
            clock.now += 1.0
            work.advance()
        return work.progress_text().rpartition(", ")[2]


@pytest.mark.parametrize(
    ("done", "total", "left"),
    [
        (0, 5, "time left unknown"),
        (1, 5, "time left unknown"),  # the first unit says nothing of the others
        (2, 5, "about 3 s left"),
        (9, 100, "time left unknown"),  # less than a tenth
        (10, 100, "about 90 s left"),
        (100, 1000, "about 15.0 min left"),
        (7, 5, "about 0 s left"),  # more than was thought
    ],
)
def test_an_estimate_rests_on_a_tenth_of_the_work_and_on_two_units(
    clock: Clock, done: int, total: int, left: str
) -> None:
    assert left_after(clock, done, total) == left


def test_a_unit_that_takes_longer_moves_the_estimate_on(clock: Clock) -> None:
    work = Work()
    with work.of(4, "steps"):
        for _ in range(2):
            clock.now += 1.0
            work.advance()
        clock.now += 9.0
        assert work.progress_text() == " (2 of 4 steps), 11 s, about 20 s left"  # 10 s for the one since the first


def test_nested_work_has_its_own_progress() -> None:
    work = Work()
    with work.of(10, "timed steps"):
        work.advance()
        with work.of(3, "steps while the others wait"):
            work.advance(2)
            assert work.progress_text().startswith(" (2 of 3 steps while the others wait)")
        with work.of(0):  # of whose own steps nobody knows the number
            work.advance(7)
            assert work.progress_text().startswith(" (1 of 10 timed steps)")
        assert work.progress_text().startswith(" (1 of 10 timed steps)")
        work.reach(4)
        assert work.progress_text().startswith(" (4 of 10 timed steps)")
    assert work.progress_text() == ""
    work.advance()  # where nothing is counted
    assert work.progress_text() == ""
