"""What the script's process tells its doctor: one JSON list a line, in a pipe, before the call that it tells of.

What stands in a pipe is read even if the writer has died meanwhile: gloo aborts a process whose tensors do not fit,
and os._exit asks nobody. A line is 40 to 100 bytes: what comes again and again (a place in the source, a group, a
kind of call) is told once and has a number from then on. A process that the script forks has the pipe too and says
nothing.
"""

import itertools
import json
import os
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from typing import Any


class Telling:
    """The writing end; safe to use from every thread of the script."""

    def __init__(self, pipe: int) -> None:
        self._pipe = pipe
        self._lock = threading.RLock()
        self._numbers: dict[tuple[str, Hashable], int] = {}
        self.calls = itertools.count(1)  # numbers for calls
        self._later: list[str] = []
        os.register_at_fork(after_in_child=self._fall_silent)

    def _fall_silent(self) -> None:
        self._pipe, self._lock = -1, threading.RLock()

    def say(self, kind: str, *values: Any) -> None:
        self.write(json.dumps([kind, *values], default=repr))

    def write(self, line: str) -> None:
        """Tell what is JSON already."""
        if self._pipe < 0:
            return
        with self._lock, suppress(OSError):  # nobody listens any more: the script goes on
            data = f"{''.join(self._later)}{line}\n".encode()
            self._later.clear()
            while data:
                data = data[os.write(self._pipe, data) :]

    def write_later(self, line: str) -> None:
        """The same with the next thing that is told: of what is over, nobody waits for the news."""
        if self._pipe >= 0:
            with self._lock:
                self._later.append(f"{line}\n")

    def number(self, kind: str, key: Hashable, values: Callable[[], Sequence[Any]]) -> int:
        """The number of what is called `key` among its kind; the `values` of a new one are told, before any thread has
        the number."""
        found = self._numbers.get((kind, key))
        if found is None:
            with self._lock:
                found = self._numbers.get((kind, key), len(self._numbers))
                self.say(kind, found, *values())
                self._numbers[kind, key] = found
        return found

    def anew(self) -> None:
        """Number all things from the beginning, for who has heard nothing yet."""
        with self._lock:
            self._numbers.clear()
            self._later.clear()
            self.calls = itertools.count(1)


def now() -> float:
    """The clock of all that is told: one for all processes of a machine."""
    return time.monotonic()
