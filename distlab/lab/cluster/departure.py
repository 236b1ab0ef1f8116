"""End a rank that has failed, was stopped, or lost its cluster: with a sentence, its records and an exit code.

The main thread may hang in C++ and a disk may block the records, so the end has its own time limit, and `os._exit` runs
no cleanup.
"""

import errno
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import NoReturn

from distlab.lab.cluster import ClusterError
from distlab.lab.cluster.messages import Place, Verdict
from distlab.lab.config import ConfigError
from distlab.lab.report.records import Lost

# The verdicts after the main thread raised an error, and whether a lost rank may be the cause.

# Parts of error messages that a lost rank can cause: gloo, NCCL and the store name an address at best.
LOSS_WORDS = ("gloo", "nccl", "store", "connection", "socket", "pipe", "timed out", "peer")


DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)


def error_verdicts(rank: int, place: Place, error: BaseException, waited_for: Iterable[str]) -> tuple[Verdict, Verdict]:
    """Return the verdict that `rank` ends with, and the one that it sends to the others.

    A refusal concerns the run and no single rank: all ranks print the same sentence, and none is lost.
    """
    if isinstance(error, ConfigError):
        refused = Verdict(2, f"refused    {'; '.join(error.faults)}")
        return refused, refused
    text = f"{type(error).__name__}: {error}".splitlines()[0][:500]
    if waits := ", ".join(waited_for):
        text += f"; it waited for {waits}"
    code = 3 if isinstance(error, ClusterError) else 1
    sentence = f"rank {rank} failed {place}: {text}"
    lost = Lost(rank, place.step, f"failed: {text}")
    others_code = code if disk_refuses(error) else 3
    return Verdict(code, sentence), Verdict(others_code, sentence, (lost,))


def disk_refuses(error: BaseException | None) -> bool:
    """Return whether the cause of `error` is a disk that is full or not writable any more.

    The disk belongs to the run and to no single rank: all ranks end in the same way, also those that only waited.
    """
    while error is not None:
        if isinstance(error, OSError) and error.errno in DISK:
            return True
        error = error.__cause__ or error.__context__
    return False


def may_be_a_loss(error: BaseException | None) -> bool:
    """Return whether a lost rank can be the cause of `error`, or of an error in its chain."""
    while error is not None:
        if isinstance(error, ConnectionError):
            return True
        if isinstance(error, (RuntimeError, OSError)) and any(word in str(error).lower() for word in LOSS_WORDS):
            return True
        error = error.__cause__ or error.__context__
    return False


# Which rank writes run.json of a broken run: the lowest survivor, and if it is lost while it writes, the next one.
#
# The others look for its file on the disk. Ranks that share no disk write one on each. A rank that was declared dead
# writes nothing, because it does not know what happened since.

POLL_S = 0.05
WRITING_S = 2.5  # how long a living rank may take to write run.json, usually 0.1 to 1.2 s: its disk may hang
NEXT_S = 0.75  # and this much longer for each other survivor in between


class Succession:
    """The survivors as one of them knows them; created as soon as the loss is named."""

    def __init__(self, rank: int, survivors: Iterable[int], *, declared_dead: bool = False) -> None:
        self.rank, self.survivors, self.declared_dead = rank, sorted(survivors), declared_dead
        self.named_at = time.monotonic()

    def is_my_turn(self, written: Callable[[], bool]) -> bool:
        """Wait until it is this rank's turn to write; False if another rank has written, according to `written`."""
        if self.declared_dead or self.rank not in self.survivors:
            return False
        before = self.survivors.index(self.rank)
        wait_s = WRITING_S + NEXT_S * (before - 1) if before else 0.0
        while not written():
            if time.monotonic() - self.named_at >= wait_s:
                return True
            time.sleep(POLL_S)
        return False


# SIGTERM, SIGHUP and Ctrl-C as bytes on a socket: a thread reads them although the main thread is blocked in C++.
#
# Python runs a signal handler on the main thread, which does not return from a collective while it waits for a rank.
# The handler in C writes to the wake-up descriptor. To be created and closed on the main thread.

EXIT_CODES = {signal.SIGTERM: 143, signal.SIGINT: 130, signal.SIGHUP: 143}  # a closed terminal stops a run, too


def handled_signals() -> list[signal.Signals]:
    """Return the stop signals, except those that the parent of this process made it ignore, as nohup does."""
    return [number for number in EXIT_CODES if signal.getsignal(number) is not signal.SIG_IGN]


class Signals:
    """The stop signals of this process, taken over from Python until `close`."""

    def __init__(self) -> None:
        self.receiver, self._sender = socket.socketpair()
        self.receiver.setblocking(False)
        self._sender.setblocking(False)
        self._previous = {number: signal.signal(number, lambda *_: None) for number in handled_signals()}
        self._previous_fd = signal.set_wakeup_fd(self._sender.fileno(), warn_on_full_buffer=False)

    def close(self) -> None:
        """Restore Python's handling."""
        signal.set_wakeup_fd(self._previous_fd)
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def wake(self) -> None:
        """End a `wait` on another thread, with None."""
        with suppress(OSError):  # the buffer is full: the waiting thread wakes anyway
            self._sender.send(b"\0")

    def wait(self, timeout_s: float) -> signal.Signals | None:
        """Return the first stop signal within `timeout_s`; None earlier after `wake`."""
        ready, _, _ = select.select([self.receiver], [], [], max(0.0, timeout_s))
        if self.receiver not in ready:
            return None
        return next((signal.Signals(number) for number in self.receiver.recv(64) if number in EXIT_CODES), None)


# End the process once, on the first thread that asks for it. A stop signal decides the exit code even if the records of
# a loss are being written.

RECORDS_S = 7.0  # for run.json and report of a broken run (finish.py), usually 5 s; a signal cuts it short
STOP_S = 0.6  # after a signal: `docker stop` ends a rank in under a second


class Departure:
    """Ends this process once, whichever thread comes first."""

    def __init__(
        self, signals: Signals, say: Callable[[str], None], on_verdict: Callable[[Verdict, Succession], None]
    ) -> None:
        self._signals, self._say, self._on_verdict = signals, say, on_verdict
        self._leaving = threading.Lock()

    def leave(self, verdict: Verdict, succession: Succession | None) -> NoReturn:
        """Print the verdict, let the entry point write records if there are any, and exit with its code."""
        if not self._leaving.acquire(blocking=False):
            if verdict.exit_code in EXIT_CODES.values():
                exit_now(verdict.exit_code)
            while True:  # the other thread is ending the process, within RECORDS_S
                time.sleep(RECORDS_S)
        threading.Thread(target=self._end_in_time, args=(verdict.exit_code,), daemon=True).start()
        with suppress(Exception):  # nobody reads the output any more
            self._say(verdict.sentence)
        with suppress(Exception):  # a full disk must not keep a rank of a broken cluster alive
            if succession is not None:
                self._on_verdict(verdict, succession)
        exit_now(verdict.exit_code)

    def _end_in_time(self, exit_code: int) -> None:
        if exit_code in EXIT_CODES.values():
            time.sleep(STOP_S)
        else:
            number, end_by = None, time.monotonic() + RECORDS_S
            # `Signals.wake` ends a wait early: then wait for the rest of the time.
            while number is None and (left_s := end_by - time.monotonic()) > 0:
                number = self._signals.wait(left_s)
            exit_code = EXIT_CODES[number] if number is not None else exit_code
        exit_now(exit_code)


def exit_now(exit_code: int) -> NoReturn:
    """Flush the output, if that does not hang for long, and end the process."""
    flushing = threading.Thread(target=_flush, daemon=True)
    flushing.start()
    flushing.join(timeout=0.2)
    os._exit(exit_code)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
