"""How a rank ends when the cluster is broken: its last words, its records, and a process that is gone for certain.

The main thread may hang in C++ and a disk may hang under the records, so the end has a bound of its own, and `os._exit`
asks nobody. SIGTERM outranks a loss in a rank's own code, even while the records of the loss are being written.
"""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import NoReturn

from workers.cluster.signals import EXIT_CODES, Signals
from workers.cluster.succession import Succession
from workers.cluster.verdict import Verdict

LAST_WORDS_S = 7.0  # for run.json and report of a broken run (rank/end.py), in 5 s as a rule; a signal cuts it short
STOP_S = 0.6  # after a signal: `docker stop` ends a rank in under a second


class Departure:
    """Ends this process once, whichever thread comes first."""

    def __init__(
        self, signals: Signals, say: Callable[[str], None], on_verdict: Callable[[Verdict, Succession], None]
    ) -> None:
        self._signals, self._say, self._on_verdict = signals, say, on_verdict
        self._leaving = threading.Lock()

    def leave(self, verdict: Verdict, succession: Succession | None) -> NoReturn:
        """Say the verdict, let the entry point write it down if there is anything to write, and exit with its code."""
        if not self._leaving.acquire(blocking=False):
            if verdict.exit_code in EXIT_CODES.values():
                exit_now(verdict.exit_code)
            while True:  # the other thread is ending the process, within LAST_WORDS_S
                time.sleep(LAST_WORDS_S)
        threading.Thread(target=self._cut_short, args=(verdict.exit_code,), daemon=True).start()
        with contextlib.suppress(Exception):  # nobody reads what is printed
            self._say(verdict.sentence)
        with contextlib.suppress(Exception):  # a full disk must not keep a rank of a broken cluster alive
            if succession is not None:
                self._on_verdict(verdict, succession)
        exit_now(verdict.exit_code)

    def _cut_short(self, exit_code: int) -> None:
        if exit_code in EXIT_CODES.values():
            time.sleep(STOP_S)
        else:
            number, end_by = None, time.monotonic() + LAST_WORDS_S
            # `Signals.wake` ends a wait early: then the rest is waited for.
            while number is None and (left_s := end_by - time.monotonic()) > 0:
                number = self._signals.wait(left_s)
            exit_code = EXIT_CODES[number] if number is not None else exit_code
        exit_now(exit_code)


def exit_now(exit_code: int) -> NoReturn:
    """Flush what was printed, if that does not hang for long, and end the process."""
    flushing = threading.Thread(target=_flush, daemon=True)
    flushing.start()
    flushing.join(timeout=0.2)
    os._exit(exit_code)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
