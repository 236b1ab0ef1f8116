"""How far long work has come: a bar on a terminal, in a log at most a line a second, since a log keeps every line.

And wherever the run is, a line once nothing was said for ten seconds: whoever waits learns that it goes on.
"""

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self, TextIO

from workers.report.journal import Journal

LINE_EVERY_S = 1.0
QUIET_S = 10.0


class Progress:
    """Counts to `total` under a `label`; `say` takes the lines of a log. Work of under a second says nothing at all."""

    def __init__(
        self, total: int, label: str, say: Callable[[str], None], stream: TextIO | None = None, *, shown: bool = True
    ) -> None:  # fmt: skip
        self.total, self.label, self.say = total, label, say
        self.done = 0
        self.shown = shown
        self._stream = stream or sys.stderr
        self._bar: Any = None
        self._said_at = time.monotonic()

    def __enter__(self) -> Self:
        if self.shown and self._stream.isatty():
            from tqdm import tqdm  # here, since ranks in containers have no terminal and need not wait for it

            self._bar = tqdm(total=self.total, desc=self.label, file=self._stream, leave=False)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()

    def advance(self, steps: int = 1) -> None:
        """Count `steps` more as done."""
        self.done += steps
        if self._bar is not None:
            self._bar.update(steps)
        elif self.shown and time.monotonic() - self._said_at >= LINE_EVERY_S:
            self._said_at = time.monotonic()
            self.say(f"{self.label:<11}{self.done} of {self.total}")


def working(journal: Journal, started_at: float, step: int, phase: str) -> None:
    """Say where the run is, which began at `started_at` in Unix time, if its log has been quiet for `QUIET_S`."""
    if time.monotonic() - journal.said_at >= QUIET_S:
        journal.say(f"working    {phase}, step {step} ({time.time() - started_at:.0f} s since the start)")
