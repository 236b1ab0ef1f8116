"""With LAB_LIVE=1 a rank shows itself while it runs: a thread puts where it is into a file, four times a second.

The main thread only notes what it passes, a phase or a loss, which costs it a microsecond; the thread asks for the
rest: the watch's place, the kernel's counters of the sockets, for whom the rank waits. What cannot be written is not
shown, and the run goes on. Without LAB_LIVE none of this is there.
"""

import math
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
from torch import Tensor

from distlab.cluster.heartbeat_helper import PERIOD_S as BEAT_S
from distlab.cluster.rendezvous import Cluster
from distlab.cluster.watchdog import Watchdog
from distlab.collectives.phases import heard
from distlab.config import Config
from distlab.contract import Build, Mode, Strategy
from distlab.lab import Lab
from distlab.measure import traffic
from distlab.measure.traffic import NoDiagnostics
from distlab.report.progress import PERIOD_S, LiveState, Work, write_status
from distlab.report.run_folder import Journal
from distlab.verify.run_all import everything
from distlab.workload.data import Microbatch

POINTS = 250  # of a loss curve: of more steps every second one stays, and so on
MOST_UNTOLD = 10_000  # losses that nobody took, as after a disk was full
STILL_S = 2 * BEAT_S  # in one place, before others' heartbeats say who is behind


def begin_status(
    config: Config, mode: Mode, cluster: Cluster, watch: Watchdog, journal: Journal, started_at: float, task: Work
) -> Mode:
    """Begin to show this rank; returns its mode, of which the run tells its phases and the variants their losses."""
    notes = Notes(lambda: watch.main.work)
    Showing(config, mode.names, cluster, watch, journal, started_at, notes, task).start()
    return notes.taken_of(mode)


class Notes:
    """What the main thread notes as it goes: the phases that are open, and its shares of the losses."""

    def __init__(self, work: Callable[[], tuple[int, str]]) -> None:
        self.phases: list[tuple[float, str]] = []  # since when, the innermost last
        self.shares: deque[tuple[str, int, Tensor]] = deque(maxlen=MOST_UNTOLD)  # variant and step, not yet taken
        self._work = work

    def taken_of(self, mode: Mode) -> Mode:
        """The same mode, of which notes are taken."""
        run = mode.run or everything

        def run_heard(lab: Lab) -> None:
            with heard(self.mark):
                run(lab)

        told = tuple(
            replace(each, build=self._telling(each.name, each.build)) if each.build else each for each in mode.variants
        )
        return replace(mode, variants=told, run=run_heard)

    def mark(self, event: str, kind: str, label: str) -> None:  # noqa: ARG002  as phases.heard calls it
        if event == "begin":
            self.phases.append((time.monotonic(), kind))
        elif self.phases:
            self.phases.pop()

    def _telling(self, name: str, build: Build) -> Build:
        def built(*parts: Any, **others: Any) -> Strategy:
            strategy = build(*parts, **others)
            backward = strategy.backward

            def told(microbatches: list[Microbatch]) -> Tensor | None:
                share = backward(microbatches)
                self._note(name, share)
                return share

            strategy.backward = told  # type: ignore[method-assign]
            return strategy

        return built

    def _note(self, name: str, share: Tensor | None) -> None:
        """Of the timed pass alone, in which the work is named by its variant."""
        step, work = self._work()
        if share is not None and work == name:
            self.shares.append((name, step, share.detach().clone()))


class Showing(threading.Thread):
    """The thread, until its rank ends."""

    def __init__(
        self, config: Config, names: tuple[str, ...], cluster: Cluster, watch: Watchdog, journal: Journal,
        started_at: float, notes: Notes, task: Work,
    ) -> None:  # fmt: skip
        super().__init__(name="live", daemon=True)
        assert journal.folder is not None
        self._folder, self._say, self._store_port = journal.folder, journal.say, cluster.store_port
        self._task = task
        self._watch, self._notes, self._names = watch, notes, sorted(names, key=len, reverse=True)
        self._sent: dict[tuple[traffic.Endpoint, traffic.Endpoint], int] = {}
        self._losses: dict[str, list[list[Any]]] = {}
        self._every: dict[str, int] = {}  # steps between two points of a curve
        self._turn, self._still_since = (0, 0), 0.0
        self._state = LiveState(
            cluster.rank, cluster.world_size, config.run_mode, socket.gethostname(), os.getpid(), started_at, 0,
            steps=config.steps,
        )  # fmt: skip

    def run(self) -> None:
        while True:
            try:
                self._state = self.state(time.monotonic())
                write_status(self._folder, self._state)
            except OSError as error:
                self._say(f"live       nothing more is shown of this rank: {error.strerror}")
                return
            time.sleep(PERIOD_S)

    def state(self, now: float) -> LiveState:
        step, work = self._watch.main.work
        place = self._watch.main.place
        since, phase = max([(place.since, "" if place.phase == work else place.phase), *self._notes.phases[-1:]])
        named = (name for name in self._names if work == name or work.endswith(f" of {name}"))
        sent, unmeasured = self._sent_bytes()
        return msgspec.structs.replace(
            self._state, beat=self._state.beat + 1, step=step, work=work, variant=next(named, ""), phase=phase,
            phase_s=round(max(0.0, now - since), 3), waits_for=self._waits_for(now), losses=self._curves(), sent=sent,
            unmeasured=unmeasured, progress=self._task.told().strip(), share=self._task.share(),
        )  # fmt: skip

    def _waits_for(self, now: float) -> list[int]:
        """Whom this rank waits for: only once it stands still are the others' heartbeats newer than its own place."""
        here = self._watch.main.here()
        if (here.turn, here.calls) != self._turn:
            self._turn, self._still_since = (here.turn, here.calls), now
        try:
            return list(self._watch.hearing.waited_for(here)) if now - self._still_since > STILL_S else []
        except KeyError:  # the watch has just let go of a rank
            return []

    def _curves(self) -> dict[str, list[list[Any]]]:
        """The shares so far as numbers: to a few digits, and None where it is no number."""
        while self._notes.shares:
            name, step, share = self._notes.shares.popleft()
            curve, every = self._losses.setdefault(name, []), self._every.setdefault(name, 1)
            value = float(share)
            if step % every == 0:
                curve.append([step, float(f"{value:.7g}") if math.isfinite(value) else None])
            if len(curve) > POINTS:  # by halves: ranks that have not come as far have the same steps among theirs
                self._every[name] = 2 * every
                curve[:] = [point for point in curve if point[0] % (2 * every) == 0]
        return self._losses

    def _sent_bytes(self) -> tuple[list[list[Any]], str]:
        """What each connection has sent, those of before too: a group of ranks that is gone has sent what it sent."""
        try:
            found = traffic.connections(self._store_port).values()
        except NoDiagnostics as error:
            return [], str(error)
        self._sent |= {(each.local, each.remote): each.sent_bytes for each in found}
        return [[[*near], [*far], sent] for (near, far), sent in self._sent.items() if sent], ""
