"""The verdict of a run that came through is decided once: every rank returns it, or none does.

Any rank may die or be paused between any two lines, so no rank may act on the verdict while another could still end
otherwise. Three rounds of beats, each a mask of ranks that all beats carry on (non-blocking commit: D. Skeen, SIGMOD
1981; here every rank hears every other; failure_detector.py says who is silent):

    accepted   it has the verdict that rank 0 gave, and will return it
    bound      it knows that all have accepted: it gives up nobody by its own judgement any more
    committed  it knows that all are bound: the verdict stands, whatever it hears

While no survivor is bound nobody can have committed: a silent rank is lost, and so is the run; when that rank wakes it
is bound at most, and learns that it was given up. Once a survivor is bound the silent rank had accepted: the survivors
finish without it and return the verdict, and so does it, when it wakes and hears their beats.
"""

import errno
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Set
from contextlib import suppress
from typing import NoReturn

from distlab.cluster import ClusterError, name_ranks
from distlab.cluster.heartbeat import SENT_TIMES, Hearing, LastReport, Post, RunPosition, Verdict, to_mask, to_ranks
from distlab.config import ConfigError
from distlab.report.records import Lost


class Agreement:
    """How far one rank has come; `look` is called with every beat, on the watch's thread."""

    def __init__(self, hearing: Hearing) -> None:
        self._hearing = hearing
        self._accepts = False
        self._committed = threading.Event()

    def accept(self) -> None:
        """This rank has the verdict."""
        self._accepts = True

    def look(self) -> None:
        """Go on as far as what was heard allows."""
        hearing = self._hearing
        own, everyone = to_mask([hearing.rank]), to_mask([hearing.rank, *hearing.peers])
        if self._accepts:
            hearing.accepted |= own
        if everyone & ~hearing.accepted == 0:
            hearing.bound |= own
        if everyone & ~hearing.bound == 0:
            self._committed.set()

    @property
    def bound(self) -> bool:
        """Whether the loss of another rank changes the verdict no more."""
        return bool(self._hearing.bound >> self._hearing.rank & 1)

    @property
    def under_way(self) -> bool:
        """Whether this rank waits for the others' word on the verdict."""
        return self._accepts and not self.committed

    @property
    def committed(self) -> bool:
        """Whether the verdict stands."""
        return self._committed.is_set()

    def wait(self, timeout_s: float) -> bool:
        """Until the verdict stands; False after `timeout_s`."""
        return self._committed.wait(timeout_s)

    def missing(self) -> set[int]:
        """The ranks that have not accepted."""
        return {rank for rank in self._hearing.peers if not self._hearing.accepted >> rank & 1}


# The normal end of a rank: its goodbye is repeated until all who still run have heard it.
#
# Who left before the others knew would be silent to them, and given up. Rank 0 hosts the store and leaves last, once
# it has heard the goodbyes of all. Who goes says so with its last beats: it acknowledges nothing any more, and
# whoever waited for that took its silence for a loss, 2.5 s at the end of most runs. Who is lost after the verdict
# changes nothing: nobody waits for it, and it is named.

AFTER = "after the verdict, which stands"


class Goodbye:
    """Of one rank. `outlived` are the ranks that were lost after the verdict, `host` the one that keeps the store."""

    def __init__(self, rank: int, hearing: Hearing, say: Callable[[str], None]) -> None:
        self.rank, self.hearing, self.say = rank, hearing, say
        self.outlived: set[int] = set()
        self.host = 0

    def heard(self, now: float, end_by: float, *, committed: bool) -> bool:
        """Whether this rank may go: every rank that still sends has heard the goodbye, and on rank 0 has said its own;
        or it is later than `end_by`. Those that fell silent since all were `committed` to a verdict are named."""
        self.hearing.ended |= to_mask([self.rank])
        gone = self.hearing.silent(now)
        waiting = [rank for rank in self.hearing.peers if rank not in gone and not self._parted(rank)]
        if waiting and now <= end_by:
            return False
        silent = gone - to_ranks(self.hearing.ended)  # who has heard this goodbye may be at work on its own
        if silent and committed:
            self.say(f"{name_ranks(silent)} lost: {AFTER}")
            self.outlived |= silent
        self.leave()
        return True

    def leave(self) -> None:
        """From now on no beat of this rank is to come."""
        self.hearing.ended |= to_mask([self.rank])
        self.hearing.left |= to_mask([self.rank])

    def _parted(self, other: int) -> bool:
        """Whether it has gone, or heard this goodbye; rank 0 waits for its own, too."""
        if self.hearing.left >> other & 1:
            return True
        knows = bool(self.hearing.peers[other].acknowledged >> self.rank & 1)
        return knows and (self.rank != self.host or bool(self.hearing.ended >> other & 1))

    def outlive(self, verdict: Verdict, now: float) -> None:
        """Ranks were lost that had accepted the run's verdict: it stands, and nobody waits for them."""
        named, peers = {entry.rank for entry in verdict.lost}, set(self.hearing.peers)
        lost = named & peers or peers - self.hearing.heard(now)  # the one cut off may be this rank
        self.say(f"{verdict.sentence}: {AFTER}")
        self.outlived |= lost
        for rank in lost:
            self.hearing.forget(rank)  # its address stays: it may wake, and hear that the verdict stands


# A rank whose main thread raised: what it ends with, what others say of it, and whether a loss may be the cause.

# Words of errors behind which a lost rank may stand: gloo, NCCL and the store name an address at best.
BLAMELESS = ("gloo", "nccl", "store", "connection", "socket", "pipe", "timed out", "peer")


DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)


def failed(rank: int, place: RunPosition, error: BaseException, waited_for: Iterable[str]) -> tuple[Verdict, Verdict]:
    """The verdict that `rank` ends with, and the one that it tells the others.

    A refusal is the run's and no rank's own: all say the same sentence, and nobody is lost.
    """
    if isinstance(error, ConfigError):
        refused = Verdict(2, f"refused    {'; '.join(error.faults)}")
        return refused, refused
    text = f"{type(error).__name__}: {error}".splitlines()[0][:500]
    if waits := ", ".join(waited_for):
        text += f"; it waited for {waits}"
    code = 3 if isinstance(error, ClusterError) else 1
    sentence = f"rank {rank} failed at step {place.step} in {place.phase}: {text}"
    lost = Lost(rank, place.step, f"failed: {text}")
    told = code if disk_refuses(error) else 3
    return Verdict(code, sentence), Verdict(told, sentence, (lost,))


def disk_refuses(error: BaseException | None) -> bool:
    """Whether a disk that is full, or that cannot be written any more, stands behind `error`.

    It is the run's disk and no rank's own: all end alike, those too that were only waiting.
    """
    while error is not None:
        if isinstance(error, OSError) and error.errno in DISK:
            return True
        error = error.__cause__ or error.__context__
    return False


def may_be_a_loss(error: BaseException | None) -> bool:
    """Whether a lost rank can be the cause of `error`, itself or in what it was raised from."""
    while error is not None:
        if isinstance(error, ConnectionError):
            return True
        if isinstance(error, (RuntimeError, OSError)) and any(word in str(error).lower() for word in BLAMELESS):
            return True
        error = error.__cause__ or error.__context__
    return False


# Who writes down what became of a broken run: the lowest survivor, and if it goes too while it writes, the next.
#
# Survivors need not share a disk, so the one that writes tells the others; they stay until they hear it, see it on
# the disk, or hear the writer no more. A rank that was given up writes nothing: it cannot know what happened since.

LOOK_S = 0.05
WRITING_S = 2.5  # how long a rank that is alive may take to write run.json, 0.1 to 1.2 s as a rule: its disk may hang
NEXT_S = 0.75  # and so much longer for each other survivor in between: they take it up one after another
CUT_OFF_S = 3.0  # a rank that takes itself for the one cut off leaves the word to the others, if it can see their file


class Succession:
    """The survivors as one of them knows them, on the thread that ends it; made as soon as the loss is named."""

    def __init__(
        self, survivors: list[int], hearing: Hearing, post: Post, *, given_up: bool = False, cut_off: bool = False
    ) -> None:
        self.rank = hearing.rank
        self.survivors, self.given_up = survivors, given_up
        self._hearing, self._post, self._cut_off = hearing, post, cut_off
        self._told = False
        self.named_at = time.monotonic()

    def turn(self, written: Callable[[], bool]) -> bool:
        """Wait until it is this rank's turn to write; False if another has written, which `written` may see."""
        rank = self.rank
        left_to_others = rank not in self.survivors and bool(self.survivors)
        while not (self.given_up or left_to_others):
            self._listen()
            if self._told or written():
                return False
            now = time.monotonic()
            lower = [survivor for survivor in self.survivors if survivor < rank]
            before = set(lower) & self._hearing.heard(now)
            waited_s, patience_s = now - self.named_at, WRITING_S + NEXT_S * (len(lower) - 1)
            if (not before or waited_s > patience_s) and not (self._cut_off and waited_s < CUT_OFF_S):
                return True
            time.sleep(LOOK_S)
        return False

    def _listen(self) -> None:
        for message in self._post.messages():
            if message["kind"] == "beat":
                self._hearing.take(message, time.monotonic())
            elif message["kind"] == "written":
                self._told = True

    def tell(self) -> None:
        """Tell the others that it is written."""
        for _ in range(SENT_TIMES):
            self._post.tell({"kind": "written", "rank": self.rank})


# SIGTERM, SIGHUP and Ctrl-C as bytes on a socket: seen at once by a thread, though the main thread is blocked in C++.
#
# Python runs a signal's handler on the main thread, which does not come back from a collective while it waits for a
# rank; the wake-up descriptor is written by the handler in C. Must be made and closed on the main thread.

EXIT_CODES = {signal.SIGTERM: 143, signal.SIGINT: 130, signal.SIGHUP: 143}  # a terminal that is gone stops a run, too


def heeded() -> list[signal.Signals]:
    """The stop signals but those that whoever started this process had it ignore, as nohup does."""
    return [number for number in EXIT_CODES if signal.getsignal(number) is not signal.SIG_IGN]


class Signals:
    """The stop signals of this process, taken over from Python until `close`."""

    def __init__(self) -> None:
        self._receiver, self._sender = socket.socketpair()
        self._receiver.setblocking(False)
        self._sender.setblocking(False)
        self._previous = {number: signal.signal(number, lambda *_: None) for number in heeded()}
        self._previous_fd = signal.set_wakeup_fd(self._sender.fileno(), warn_on_full_buffer=False)

    def close(self) -> None:
        """Give them back."""
        signal.set_wakeup_fd(self._previous_fd)
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def wake(self) -> None:
        """End a `wait` that is under way, on another thread, with None."""
        with suppress(OSError):  # it is full: whoever waits wakes anyway
            self._sender.send(b"\0")

    def wait(self, timeout_s: float) -> signal.Signals | None:
        """The first stop signal within `timeout_s`; None earlier after `wake`."""
        ready, _, _ = select.select([self._receiver], [], [], max(0.0, timeout_s))
        if self._receiver not in ready:
            return None
        return next((signal.Signals(number) for number in self._receiver.recv(64) if number in EXIT_CODES), None)


# How a rank ends when the cluster is broken: its last words, its records, and a process that is gone for certain.
#
# The main thread may hang in C++ and a disk may hang under the records, so the end has a bound of its own, and
# `os._exit` asks nobody. SIGTERM outranks a loss in a rank's own code, even while the records of the loss are being
# written.

LAST_WORDS_S = 7.0  # for run.json and report of a broken run (finish.py), in 5 s as a rule; a signal cuts it short
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
        with suppress(Exception):  # nobody reads what is printed
            self._say(verdict.sentence)
        with suppress(Exception):  # a full disk must not keep a rank of a broken cluster alive
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
        with suppress(Exception):
            stream.flush()


# Where ranks need not wait for each other, the loss of one is not the end of all: the others part from it and go on.
#
# Rank 0 stays needed as long as it hosts the store, and so does a majority: who hears too few ranks takes itself for
# the one that is cut off. A rank that was given up and wakes learns it from the verdict, which names it,
# and ends.
#
# Where no rank hosts what the others need, each may be lost. Then it matters whether a rank is dead or silent: a
# process that dies hangs up, which `hung_up` tells, and is mourned after GONE_S; one that is silent may live on the
# far side of a cut. So of two halves that do not hear each other the one with the lowest rank goes on, and the other
# ends.

GONE_S = 1.0  # four beats: who hung up and is silent for so long has died


class Parting:
    """What one rank does with a verdict once ranks may leave; until `on_left` is set, none may."""

    def __init__(self, hearing: Hearing, post: Post, say: Callable[[str], None]) -> None:
        self._hearing, self._post, self._say = hearing, post, say
        self.on_left: Callable[[Lost], None] | None = None
        self.needed: Set[int] = {0}
        self.hung_up: Callable[[], Set[int]] = frozenset  # the ranks whose processes have closed their connections
        self.heard_at: dict[int, float] = {}  # of those that have left: when they were heard last
        self.back_at: dict[int, float] = {}  # of those that have come back: when they were taken in

    def allows(self, verdict: Verdict) -> bool:
        """Whether this rank can go on without those that the verdict names."""
        lost = {entry.rank for entry in verdict.lost}
        may_leave = self.on_left is not None and verdict.exit_code == 3 and bool(lost)
        return may_leave and not lost & (self.needed | {self._hearing.rank}) and (bool(self.needed) or self._more(lost))

    def _more(self, lost: Set[int]) -> bool:
        """Whether those that may live on without hearing this side are fewer, or as many without the lowest rank."""
        here = self._hearing.present() - lost
        silent = lost & self._hearing.present() - self.hung_up()
        return (len(here), -min(here)) > (len(silent), -min(silent, default=min(here) + 1))

    def gone(self, seen: Mapping[int, LastReport]) -> Verdict | None:
        """The verdict on those that hung up and are silent since; it takes no vote."""
        dead = sorted(rank for rank in self.hung_up() & set(self._hearing.peers) if seen[rank].silent_s > GONE_S)
        if not dead:
            return None
        reason = f"its connections were closed, and no heartbeat for {GONE_S:g} s"
        sentence = "; ".join(f"rank {rank} lost {seen[rank].place}: {reason}" for rank in dead)
        return Verdict(3, sentence, tuple(Lost(rank, seen[rank].step, reason) for rank in dead))

    def taken_in(self, rank: int, now: float) -> None:
        """A rank that had left is here again."""
        self.heard_at.pop(rank, None)
        self.back_at[rank] = now

    def of_a_former_life(self, verdict: Verdict, now: float) -> bool:
        """Whether another rank says this of who has come back since: who dies again is not given up so soon."""
        lost = {entry.rank for entry in verdict.lost}
        return bool(lost) and all(now - self.back_at.get(rank, now - GONE_S) < GONE_S for rank in lost)

    def part(self, verdict: Verdict) -> bool:
        """Go on without the ranks of the verdict, and say its words to the others; False for an echo of what is
        known."""
        news = [entry for entry in verdict.lost if entry.rank in self._hearing.peers]
        if not news or self.on_left is None:
            return False
        self._post.tell_verdict(verdict, stopped=False)  # to those it names too, should they wake up
        self._say(f"{verdict.sentence}; the remaining ranks continue")
        for entry in news:
            self.heard_at[entry.rank] = self._hearing.forget(entry.rank).heard_at
            del self._post.addresses[entry.rank]
            self.on_left(entry)
        return True
