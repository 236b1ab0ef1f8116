"""How far the work under way has come: a heartbeat in rank 0's log, every ten seconds at most, a line that is rewritten
on a terminal.

A pass says of how many units it is, and counts those that are done; the watch's thread tells it. There is one estimate:
what is left takes as long a unit as what was done, from the first unit's end on, since the first one holds imports and
buffers. While less than a tenth is done, or where nobody knows how many units there are, it is said to be unknown.
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
SURE = 0.1  # the share of the work from which on an estimate is said


class Task:
    """One piece of work of `total` units, `what` they are called; a `total` of 0 is not known."""

    def __init__(self, total: float, what: str, now: float) -> None:
        self.total, self.what, self.began_at = total, what, now
        self.done = 0.0
        self._first: tuple[float, float] | None = None  # when the first was done, and how much then

    def advance(self, units: float, now: float) -> None:
        """Count `units` more as done."""
        self.done += units
        self._first = self._first or (now, self.done)

    def left_s(self, now: float) -> float | None:
        """Seconds that the rest may take, at time `now`; None where nothing says so."""
        if self._first is None or self.done < SURE * self.total or self.done <= self._first[1]:
            return None
        began_at, before = self._first
        return (now - began_at) * max(0.0, self.total - self.done) / (self.done - before)

    def told(self, now: float) -> str:
        """What is done of it, since when, and how long it may still take."""
        left_s = self.left_s(now)
        left = "time left unknown" if left_s is None else f"about {duration(left_s)} left"
        done = min(self.done, self.total)
        return f" ({done:.0f} of {self.total:.0f} {self.what}), {duration(now - self.began_at)}, {left}"


class Work:
    """The work under way on a rank, a task within a task; written by the main thread, read by the watch's."""

    def __init__(self) -> None:
        self._tasks: tuple[Task, ...] = ()

    @contextmanager
    def of(self, total: float, what: str = "") -> Iterator[None]:
        """Around work of `total` units, each counted by `advance`; of 0 if nobody knows how many, and what is counted
        within counts for nothing around it."""
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
        """So many units of the innermost work are done by now."""
        if self._tasks:
            self.advance(done - self._tasks[-1].done)

    def told(self) -> str:
        """How far the innermost work is of which the units are known; empty where there is none."""
        known = [task for task in self._tasks if task.total]
        return known[-1].told(time.monotonic()) if known else ""


class Heartbeat:
    """What rank 0 says of itself while it works, so that whoever waits learns that it goes on, and for how long."""

    def __init__(self, journal: Journal, work: Work, started_at: float, *, rewrites: bool = False) -> None:
        """`started_at` in Unix time: the run's beginning; a terminal `rewrites` the line, a log has one more."""
        self._journal, self._work, self._started_at = journal, work, started_at
        self._every_s = REWRITTEN_EVERY_S if rewrites else EVERY_S
        self._said_at = self._kept_at = time.monotonic()

    def beat(self, _step: int, phase: str) -> None:
        """Say where the run is, if it has not been said for long; `Work` knows the step in units of its own."""
        now = time.monotonic()
        if now - self._said_at < self._every_s:
            return
        self._said_at = now
        kept = now - self._kept_at >= EVERY_S
        self._kept_at = now if kept else self._kept_at
        unknown = f", {duration(time.time() - self._started_at)} since the start, time left unknown"
        self._journal.say(log_line("working", f"{phase}{self._work.told() or unknown}"), "normal", kept=kept)


@contextmanager
def telling(what: str, *, told: bool = True) -> Iterator[None]:
    """Around what says nothing of itself for long, such as an import: say every ten seconds that it goes on, where it
    is to be `told`."""
    over, began_at = threading.Event(), time.monotonic()

    def tell() -> None:
        while not over.wait(EVERY_S):
            printed(log_line("starting", f"{what}, {duration(time.monotonic() - began_at)}"))

    thread = threading.Thread(target=tell, daemon=True)
    if told:
        thread.start()
    try:
        yield
    finally:
        over.set()
        if told:
            thread.join()  # no rank is forked beside it
