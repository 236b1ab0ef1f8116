"""Drills: the faults of LAB_FAULTS, made when their moment comes, and what should come of each written down before.

Every rank has the same plan. As a step begins, or by a clock of its own, the rank that an event names makes it
(workers/faults/); where a link is to break one way, the others do their part. Bits flip within a step (flips.py). What
came of it is judged from the records at the end (workers/report/drills.py).
"""

import heapq
import threading
import time
from collections.abc import Iterator

from workers.checkpoint import finding, lease
from workers.checkpoint.manifest import Unreadable, read
from workers.cluster.link import bits_s
from workers.cluster.rendezvous import Cluster
from workers.config import Config
from workers.config.events import arrivals, planned
from workers.config.faults import Fault
from workers.contract import Mode
from workers.faults import files, links, process
from workers.rank.flips import Flips, draw_of
from workers.report.journal import Journal
from workers.report.records import Injected, Planned, Refused, Stood

NAMED_S = 2.5  # beside LAB_LOST_AFTER_S: until all tables agree, the words go round, and a busy machine
UNSURE_S = 1.5  # so much after LAB_LOST_AFTER_S a silence may be forgiven still
DATAGRAMS = "of what comes the heartbeats alone, since this kernel wants NET_ADMIN to drop what comes by TCP"


class Drills:
    """The drills of one rank."""

    def __init__(self, config: Config, mode: Mode, journal: Journal, cluster: Cluster) -> None:
        assert config.rank is not None, "a rank has RANK"
        self.config, self.mode, self.rank, self.journal, self.cluster = config, mode, config.rank, journal, cluster
        self.entries = config.planned_faults
        self.events = planned(self.entries, config.seed, config.world_size)
        self._step = 0  # of the training itself, that began last
        self._timed_alike = {each.name for each in mode.variants if each.build is not None}  # in step on all ranks
        self._made: set[int] = set()
        self._hears_nobody, self._deaf_to = False, set[int]()
        mine = [each for each in self.events if each.flipped and each.rank == config.rank]
        self.flips = Flips(config, mode, mine, self._note)

    def begin(self) -> None:
        """From now on faults come: write down what should come of each, and begin to count seconds."""
        for event in self.events:
            self._plan(event)
        threading.Thread(target=self._by_the_clock, name="drills", daemon=True).start()

    def step(self, step: int, variant: str) -> None:
        """A step begins: what comes at a step comes once, in the first variant; bits flip in each."""
        self._step = step
        if variant in self._timed_alike:
            self.journal.write(Stood(variant, [time.time()]))
        self.flips.step(step, variant)
        for event in self.events:
            if event.step == step and not event.flipped and event.number not in self._made:
                self._make(event, step)

    # --- what comes at a second ---

    def _by_the_clock(self) -> None:
        """Each event at its second, on every rank at about the same moment."""
        began = time.monotonic()
        for event in self._timed():
            time.sleep(max(0.0, began + (event.at_s or 0.0) - time.monotonic()))
            if event.number not in {each.number for each in self.events}:
                self._plan(event)
            self._make(event, self._step)

    def _timed(self) -> Iterator[Fault]:
        seed, world_size = self.config.seed, self.config.world_size
        again = [
            arrivals(entry, index, seed, world_size)
            for index, entry in enumerate(self.entries)
            if entry.every_s is not None
        ]
        once = sorted((each for each in self.events if each.at_s is not None), key=lambda each: each.at_s or 0.0)
        return heapq.merge(once, *again, key=lambda each: each.at_s or 0.0)

    # --- making them ---

    def _plan(self, event: Fault) -> None:
        """Write down what should come of it; of a flipped bit the bound is in steps."""
        bound = NAMED_S + self.config.lost_after_s
        bound = float(self.config.audited_every or 1) if event.flipped else bound
        assert event.rank is not None
        outcome = outcome_of(event, self.config.lost_after_s)
        watched = list(self.mode.watched) if event.flipped else []
        self.journal.write(
            Planned(event.number, event.label, event.kind, event.rank, outcome, bound, event.step, watched)
        )  # fmt: skip

    def _note(self, event: Fault, step: int, variant: str = "", detail: str = "", outcome: str = "") -> None:
        self.journal.write(Injected(event.number, self.rank, step, variant, time.time(), detail, outcome))
        told = f": {detail}" if detail else ""
        self.journal.say(f"drill      {event.label}{f' in {variant}' if variant else ''}{told}")

    def _make(self, event: Fault, step: int) -> None:
        """This rank's part of an event."""
        self._made.add(event.number)
        mine = event.rank == self.rank
        if event.kind == "cut":
            self._cut(event, step, mine=mine)
        elif event.kind == "corrupt_checkpoint" and mine:
            self._damage(event, step)
        elif mine:
            self._note(event, step)
            if event.kind == "kill":
                process.kill()
            elif event.kind == "pause":
                process.pause(event.duration_s or 0.0)
            elif event.kind == "slow_rank":
                process.slow_down(event.share or 1.0)
            elif event.kind == "slow_link":
                links.set_pace(round(bits_s(event.rate) / 8))
            elif event.kind == "full_disk":
                files.fill(self.journal.open_files)
                self.journal.say("drill      the disk is full from here on")

    def _cut(self, event: Fault, step: int, *, mine: bool) -> None:
        """The rank stops hearing, the others stop hearing it, or both."""
        if mine:
            self._hears_nobody = self._hears_nobody or event.way != "out"
            whole = event.way == "out" or links.hear_nobody()
            self._note(event, step, detail="" if whole else DATAGRAMS)
            if event.way == "out" or not (whole or event.duration_s):
                links.send_nothing()
        elif event.way != "in" and event.rank is not None:
            self._deaf_to.add(event.rank)
            self._deafen()
        if event.duration_s is not None:
            threading.Timer(event.duration_s, self._mend, [event]).start()

    def _mend(self, event: Fault) -> None:
        """A cut is over; others may not be."""
        if event.rank == self.rank:
            self._hears_nobody = False
            links.hear_again()
        if event.rank is not None:
            self._deaf_to.discard(event.rank)
        self._deafen()

    def _deafen(self) -> None:
        """Of all who are cut off nothing is heard: a socket has one filter, which who hears nobody needs for that."""
        if not self._hears_nobody:
            members = [self.cluster.members[rank] for rank in sorted(self._deaf_to)]
            links.deafen_to(self.cluster.socket, [(each.ip, each.udp_port) for each in members])

    def _damage(self, event: Fault, step: int) -> None:
        """Flip a bit of the newest checkpoint, then look for one to go on from, as a resumed run does."""
        assert self.journal.folder is not None
        (newest, *_) = finding.candidates(self.journal.folder)
        name = files.damage(newest, list(read(newest).files), draw_of(event, self.config.seed))
        self._note(event, step, detail=f"{newest.name}/{name}")
        said: list[str] = []
        try:
            found = finding.newest_good(self.journal.folder, said.append)
            lease.release(found.held if found else None)
        except Unreadable as error:
            said.append(str(error))
        for sentence in said[:1]:
            self.journal.write(Refused(event.number, sentence))


def outcome_of(event: Fault, lost_after_s: float) -> str:
    """What should come of an event, as workers/report/drills.py names it."""
    if event.kind in ("slow_link", "slow_rank"):
        return "survived"
    if event.kind in ("pause", "cut") and event.duration_s is not None:
        sure = event.duration_s >= lost_after_s + UNSURE_S
        return "survived" if event.duration_s <= lost_after_s else "lost" if sure else "open"
    if event.way == "in":
        return "broken"
    return {"full_disk": "full", "corrupt_checkpoint": "refused", "flip": "seen"}.get(event.kind, "lost")
