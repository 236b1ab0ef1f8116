"""Inject the faults of LAB_FAULTS at their times, and record beforehand what each must lead to.

Every rank has the same plan (distlab/lab/config/fault_spec.py). At the start of a step, or by its own clock, the rank
of an event injects it, without any privilege: the kernel kills, stops or slows the process, its heartbeats are dropped,
its sockets are paced, or the disk is full. The outcome is judged from the records at the end
(distlab/lab/report/fault_checks.py).
"""

import os
import signal
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from distlab.lab.cluster.join import Cluster
from distlab.lab.cluster.link import bits_s
from distlab.lab.config import Config
from distlab.lab.config.fault_spec import FaultSpec, planned
from distlab.lab.report.records import Injected, Planned
from distlab.lab.report.run_folder import Journal

DETECTION_S = 2.5  # added to LAB_LOST_AFTER_S until a loss is named: messages between ranks, and a busy machine
UNSURE_S = 1.5  # a silence of up to this much more than LAB_LOST_AFTER_S may or may not count as a loss


class FaultInjector:
    """The fault injection of one rank."""

    def __init__(self, config: Config, journal: Journal, cluster: Cluster) -> None:
        assert config.rank is not None, "a rank has RANK"
        self.config, self.rank, self.journal, self.cluster = config, config.rank, journal, cluster
        self.events = planned(config.planned_faults, config.seed, config.world_size)
        self._step = 0  # of the training itself, the latest begun
        self._injected: set[int] = set()

    def begin(self) -> None:
        """Record the expected outcome of each fault, and start the clock of the timed ones."""
        for event in self.events:
            assert event.rank is not None
            outcome, bound_s = outcome_of(event, self.config.lost_after_s), DETECTION_S + self.config.lost_after_s
            self.journal.write(
                Planned(event.number, event.label, event.kind, event.rank, outcome, bound_s, event.step)
            )  # fmt: skip
        threading.Thread(target=self._inject_timed_faults, name="faults", daemon=True).start()

    def step(self, step: int, _variant: str) -> None:
        """Inject the faults of a step at its start, once, in the first variant."""
        self._step = step
        for event in self.events:
            if event.step == step and event.number not in self._injected:
                self._inject(event, step)

    def _inject_timed_faults(self) -> None:
        began = time.monotonic()
        timed = [(each.at_s, each.number, each) for each in self.events if each.at_s is not None]
        for at_s, _, event in sorted(timed):
            time.sleep(max(0.0, began + at_s - time.monotonic()))
            self._inject(event, self._step)

    # --- injecting faults ---

    def _inject(self, event: FaultSpec, step: int) -> None:
        self._injected.add(event.number)
        if event.rank != self.rank:
            return
        self.journal.write(Injected(event.number, self.rank, step, "", time.time()))
        self.journal.say(f"fault      {event.label}", "normal")
        if event.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)  # as the kernel does when memory runs out: nothing more is written
        elif event.kind == "cut":
            self._cut(event)
        elif event.kind == "pause":
            pause(event.duration_s or 0.0)
        elif event.kind == "slow_rank":
            slow_down(event.share or 1.0)
        elif event.kind == "slow_link":
            set_pace(round(bits_s(event.rate) / 8))
        elif event.kind == "full_disk":
            fill(self.journal.open_files)
            self.journal.say("fault      disk-full fault injected", "normal")

    def _cut(self, event: FaultSpec) -> None:
        """Drop heartbeats to this rank, from it, or both; without a duration also pace its connections to 1 byte/s.

        A cut that ends cannot use pacing, because the packets that it delays would still be late afterwards.
        """
        self._drop_heartbeats(received=event.way != "out", sent=event.way != "in")
        if event.duration_s is None:
            set_pace(LOWEST_PACE, but=self.cluster.uplink.connection if event.way == "in" else None)
        else:
            threading.Timer(event.duration_s, partial(self._drop_heartbeats, received=False, sent=False)).start()

    def _drop_heartbeats(self, *, received: bool, sent: bool) -> None:
        """Set whether this rank receives and sends over its server connection; the host still reaches itself."""
        if self.cluster.server is not None:
            self.cluster.server.cut_off = received or sent
        else:
            self.cluster.uplink.drops_received, self.cluster.uplink.drops_sent = received, sent


def outcome_of(event: FaultSpec, lost_after_s: float) -> str:
    """Return the expected outcome of an event, as distlab/lab/report/fault_checks.py names it."""
    if event.kind in ("slow_link", "slow_rank"):
        return "survived"
    if event.kind in ("pause", "cut") and event.duration_s is not None:
        sure = event.duration_s >= lost_after_s + UNSURE_S
        return "survived" if event.duration_s <= lost_after_s else "lost" if sure else "open"
    if event.way == "in":
        return "broken"
    return "full" if event.kind == "full_disk" else "lost"


# A full disk: Linux's /dev/full, to which every write fails as on a full disk. It replaces this rank's log and records,
# so other processes are not affected.

FULL = Path("/dev/full")


def fill(descriptors: list[int]) -> None:
    """Let each write to these open files fail as on a full disk; raises OSError on a system without /dev/full."""
    full = os.open(FULL, os.O_WRONLY | os.O_APPEND)
    try:
        for each in descriptors:
            os.dup2(full, each)
    finally:
        os.close(full)


# Slow links: the kernel paces each connection to a maximum rate (socket(7), SO_MAX_PACING_RATE). compose/net.yaml adds
# delays, and limits the rate of a whole container.

SO_MAX_PACING_RATE = 47
LOWEST_PACE, NO_PACE = 1, 0xFFFFFFFF  # bytes per second


def set_pace(bytes_s: int, but: socket.socket | None = None) -> None:
    """Limit the rate of each connection from this process to another one, except `but`."""
    for each in _connections_to_others():
        if but is None or each.getsockname() != but.getsockname():
            each.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, struct.pack("=I", min(bytes_s, NO_PACE)))


def _connections_to_others() -> Iterator[socket.socket]:
    near = {each.getsockname()[:2] for each in _connections()}
    for each in _connections():
        if each.getpeername()[:2] not in near:  # else this process has both ends: rank 0's connection to its own server
            yield each


def _connections() -> Iterator[socket.socket]:
    for name in os.listdir("/proc/self/fd"):
        with (
            suppress(OSError),
            _socket_of(int(name)) as found,
        ):  # a file, or the listing's own descriptor
            if found.family in (socket.AF_INET, socket.AF_INET6) and found.getpeername():
                yield found


@contextmanager
def _socket_of(descriptor: int) -> Iterator[socket.socket]:
    """Open the socket of a descriptor through a duplicate, closed at the end; raises OSError if it is no socket."""
    copied = os.dup(descriptor)
    try:
        found = socket.socket(fileno=copied)
    except OSError:
        os.close(copied)
        raise
    with found:
        yield found


# The kernel stops a rank's process for a while, or gives it less of its core.
#
# SIGSTOP stops all its threads. A stopped process cannot wake itself: a small shell next to it sleeps, and wakes it.

PERIOD_S = 0.1  # a slow rank runs for its share of each period: too short to delay a heartbeat
WAKE = 'sleep "$1"; kill -CONT "$0"'
SLOW = 'while kill -STOP "$0" 2>/dev/null && sleep "$1" && kill -CONT "$0"; do sleep "$2"; done'


def pause(duration_s: float) -> None:
    """Stop all threads of this process for so long."""
    _run_in_shell(WAKE, duration_s)
    os.kill(os.getpid(), signal.SIGSTOP)


def slow_down(share: float) -> None:
    """Let this process run for only `share` of the time, as if a neighbour used the rest of the core."""
    _run_in_shell(SLOW, PERIOD_S * (1 - share), PERIOD_S * share)


def _run_in_shell(script: str, *seconds: float) -> None:
    subprocess.Popen(
        ["sh", "-c", script, str(os.getpid()), *(f"{each:.3f}" for each in seconds)], cwd="/",
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
