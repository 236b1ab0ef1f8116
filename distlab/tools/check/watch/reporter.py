"""The reports of the script's process to its supervisor: one JSON list per line, piped before the reported call.

Data in a pipe can be read even if the writer has died: gloo aborts a process if tensors do not fit, and os._exit runs
no handlers. A line has 40 to 100 bytes: repeated things (a source place, a group, a kind of call) are reported once and
then have a number. A process that the script forks has the pipe too but writes nothing.
"""

import itertools
import json
import os
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from typing import Any


class Reporter:
    """The writing end; safe to use from every thread of the script."""

    def __init__(self, pipe: int) -> None:
        self._pipe = pipe
        self._lock = threading.RLock()
        self._numbers: dict[tuple[str, Hashable], int] = {}
        self.calls = itertools.count(1)  # numbers for calls
        self._later: list[str] = []
        os.register_at_fork(after_in_child=self._disconnect)

    def _disconnect(self) -> None:
        self._pipe, self._lock = -1, threading.RLock()

    def send(self, kind: str, *values: Any) -> None:
        self.write(json.dumps([kind, *values], default=repr))

    def write(self, line: str) -> None:
        """Write a line that is JSON already."""
        if self._pipe < 0:
            return
        with self._lock, suppress(OSError):  # no reader any more: the script continues
            data = f"{''.join(self._later)}{line}\n".encode()
            self._later.clear()
            while data:
                data = data[os.write(self._pipe, data) :]

    def write_later(self, line: str) -> None:
        """Write it together with the next report: the end of a call is not urgent."""
        if self._pipe >= 0:
            with self._lock:
                self._later.append(f"{line}\n")

    def number(self, kind: str, key: Hashable, values: Callable[[], Sequence[Any]]) -> int:
        """Return the number of `key` among its kind; the `values` of a new one are written before any thread gets the
        number."""
        found = self._numbers.get((kind, key))
        if found is None:
            with self._lock:
                found = self._numbers.get((kind, key), len(self._numbers))
                self.send(kind, found, *values())
                self._numbers[kind, key] = found
        return found

    def reset(self) -> None:
        """Number all things again, for a new reader."""
        with self._lock:
            self._numbers.clear()
            self._later.clear()
            self.calls = itertools.count(1)


def now() -> float:
    """Return the time of a report: one clock for all processes of a machine."""
    return time.monotonic()
