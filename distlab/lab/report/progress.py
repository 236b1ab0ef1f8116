"""Progress of the work under way: a line in rank 0's log at least every ten seconds, rewritten in place on a terminal.

A pass declares its number of units and counts finished ones; the watch's thread prints them. The estimate assumes that
the remaining units take as long as those already done, not counting the first, which includes imports and buffers.
While less than a tenth is done, or the number of units is unknown, the time left is "unknown".
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from distlab.lab.report.run_folder import Journal
from distlab.lab.report.standard_streams import printed
from distlab.lab.report.table import log_line
from distlab.lab.report.units import duration

REWRITTEN_EVERY_S = 1.0
EVERY_S = 9.5  # the watch looks four times a second: a line is there within ten
SURE = 0.1  # estimates are printed from this share of the work on


class Task:
    """A piece of work of `total` units, called `what`; a `total` of 0 means unknown."""

    def __init__(self, total: float, what: str, now: float) -> None:
        self.total, self.what, self.began_at = total, what, now
        self.done = 0.0
        self._first: tuple[float, float] | None = None  # the time when the first was done, and the units done then

    def advance(self, units: float, now: float) -> None:
        """Count `units` more as done."""
        self.done += units
        self._first = self._first or (now, self.done)

    def left_s(self, now: float) -> float | None:
        """Return the estimated seconds left at time `now`; None if unknown."""
        if self._first is None or self.done < SURE * self.total or self.done <= self._first[1]:
            return None
        began_at, before = self._first
        return (now - began_at) * max(0.0, self.total - self.done) / (self.done - before)

    def progress_text(self, now: float) -> str:
        """Return how much is done, for how long it has run, and the time left."""
        left_s = self.left_s(now)
        left = "time left unknown" if left_s is None else f"about {duration(left_s)} left"
        done = min(self.done, self.total)
        return f" ({done:.0f} of {self.total:.0f} {self.what}), {duration(now - self.began_at)}, {left}"


class Work:
    """The work of a rank, as nested tasks; written by the main thread, read by the watch's."""

    def __init__(self) -> None:
        self._tasks: tuple[Task, ...] = ()

    @contextmanager
    def of(self, total: float, what: str = "") -> Iterator[None]:
        """Wrap work of `total` units, counted by `advance`; of 0 if the number is unknown, and then units inside are
        not counted."""
        before = self._tasks
        self._tasks = (*before, Task(total, what, time.monotonic()))
        try:
            yield
        finally:
            self._tasks = before

    def advance(self, units: float = 1) -> None:
        """Count `units` more of the innermost work as done."""
        if self._tasks:
            self._tasks[-1].advance(units, time.monotonic())

    def reach(self, done: float) -> None:
        """Set the number of finished units of the innermost work."""
        if self._tasks:
            self.advance(done - self._tasks[-1].done)

    def progress_text(self) -> str:
        """Return the progress of the innermost work with known units; empty if there is none."""
        known = [task for task in self._tasks if task.total]
        return known[-1].progress_text(time.monotonic()) if known else ""


class Heartbeat:
    """Rank 0's progress lines during work, which show that it continues and how long it will take."""

    def __init__(self, journal: Journal, work: Work, started_at: float, *, rewrites: bool = False) -> None:
        """`started_at` is the run's start in Unix time; a terminal `rewrites` the line, a log gets a new one."""
        self._journal, self._work, self._started_at = journal, work, started_at
        self._every_s = REWRITTEN_EVERY_S if rewrites else EVERY_S
        self._printed_at = self._kept_at = time.monotonic()

    def beat(self, _step: int, phase: str) -> None:
        """Print the progress if the last line is old; `Work` counts the step in its own units."""
        now = time.monotonic()
        if now - self._printed_at < self._every_s:
            return
        self._printed_at = now
        kept = now - self._kept_at >= EVERY_S
        self._kept_at = now if kept else self._kept_at
        unknown = f", {duration(time.time() - self._started_at)} since the start, time left unknown"
        self._journal.say(log_line("working", f"{phase}{self._work.progress_text() or unknown}"), "normal", kept=kept)


@contextmanager
def announcing(what: str, *, enabled: bool = True) -> Iterator[None]:
    """Wrap silent work such as an import: print every ten seconds that it continues, if `enabled`."""
    over, began_at = threading.Event(), time.monotonic()

    def announce() -> None:
        while not over.wait(EVERY_S):
            printed(log_line("starting", f"{what}, {duration(time.monotonic() - began_at)}"))

    thread = threading.Thread(target=announce, daemon=True)
    if enabled:
        thread.start()
    try:
        yield
    finally:
        over.set()
        if enabled:
            thread.join()  # no rank is forked while it runs
