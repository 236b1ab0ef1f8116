"""Inject the faults of LAB_FAULTS at their moments, and record beforehand what each must lead to.

Every rank has the same plan. At the start of a step, or by its own clock, the rank of an event injects it
(distlab/lab/faults/). The outcome is judged from the records at the end (distlab/lab/report/fault_checks.py).
"""

import threading
import time

from distlab.lab import faults
from distlab.lab.cluster.join import Cluster
from distlab.lab.cluster.link import bits_s
from distlab.lab.config import Config
from distlab.lab.config.fault_spec import FaultSpec, planned
from distlab.lab.report.records import Injected, Planned
from distlab.lab.report.run_folder import Journal

NAMED_S = 2.5  # added to LAB_LOST_AFTER_S: until all tables agree, messages arrive, and for a busy machine
UNSURE_S = 1.5  # for this long after LAB_LOST_AFTER_S a silence may still be forgiven
HEARTBEATS = "heartbeats alone, since this kernel wants NET_ADMIN to drop what comes by TCP"


class Drills:
    """The fault injection of one rank."""

    def __init__(self, config: Config, journal: Journal, cluster: Cluster) -> None:
        assert config.rank is not None, "a rank has RANK"
        self.config, self.rank, self.journal, self.cluster = config, config.rank, journal, cluster
        self.events = planned(config.planned_faults, config.seed, config.world_size)
        self._step = 0  # of the training itself, the latest begun
        self._made: set[int] = set()

    def begin(self) -> None:
        """Let faults come from now on: record the expected outcome of each, and begin to count seconds."""
        for event in self.events:
            assert event.rank is not None
            outcome, bound_s = outcome_of(event, self.config.lost_after_s), NAMED_S + self.config.lost_after_s
            self.journal.write(
                Planned(event.number, event.label, event.kind, event.rank, outcome, bound_s, event.step)
            )  # fmt: skip
        threading.Thread(target=self._by_the_clock, name="drills", daemon=True).start()

    def step(self, step: int, _variant: str) -> None:
        """Inject the faults of a step at its start, once, in the first variant."""
        self._step = step
        for event in self.events:
            if event.step == step and event.number not in self._made:
                self._make(event, step)

    def _by_the_clock(self) -> None:
        began = time.monotonic()
        timed = [(each.at_s, each.number, each) for each in self.events if each.at_s is not None]
        for at_s, _, event in sorted(timed):
            time.sleep(max(0.0, began + at_s - time.monotonic()))
            self._make(event, self._step)

    # --- injecting faults ---

    def _note(self, event: FaultSpec, step: int, detail: str = "") -> None:
        self.journal.write(Injected(event.number, self.rank, step, "", time.time(), detail))
        self.journal.say(f"fault      {event.label}{f': {detail}' if detail else ''}", "normal")

    def _make(self, event: FaultSpec, step: int) -> None:
        self._made.add(event.number)
        if event.rank != self.rank:
            return
        if event.kind == "cut":
            self._cut(event, step)
            return
        self._note(event, step)
        if event.kind == "kill":
            faults.kill()
        elif event.kind == "pause":
            faults.pause(event.duration_s or 0.0)
        elif event.kind == "slow_rank":
            faults.slow_down(event.share or 1.0)
        elif event.kind == "slow_link":
            faults.set_pace(round(bits_s(event.rate) / 8))
        elif event.kind == "full_disk":
            faults.fill(self.journal.open_files)
            self.journal.say("fault      disk-full fault injected", "normal")

    def _cut(self, event: FaultSpec, step: int) -> None:
        """Stop this rank from receiving from the others, from sending to them, or both."""
        self._mute(deaf=event.way != "out", mute=event.way != "in")
        # A filter drops acknowledgements too: after TCP's first timeout a rank cut only inwards could not send.
        line = self.cluster.line.connection if event.way == "in" else None
        whole = event.way == "out" or faults.hear_nobody(but=line)
        self._note(event, step, detail="" if whole else HEARTBEATS)
        if event.way == "out" or not (whole or event.duration_s):
            faults.send_nothing()
        if event.duration_s is not None:
            threading.Timer(event.duration_s, self._mend).start()

    def _mend(self) -> None:
        """End a cut."""
        self._mute(deaf=False, mute=False)
        faults.hear_again()

    def _mute(self, *, deaf: bool, mute: bool) -> None:
        """Set whether this rank receives and sends over its server connection; the host still reaches itself."""
        if self.cluster.server is not None:
            self.cluster.server.cut_off = deaf or mute
        else:
            self.cluster.line.deaf, self.cluster.line.mute = deaf, mute


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
