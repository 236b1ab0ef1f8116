"""Drills: the faults of LAB_FAULTS, made when their moment comes, and what should come of each written down before.

Every rank has the same plan. As a step begins, or by a clock of its own, the rank that an event names makes it
(workers/faults/); where a link is to break one way, the others do their part. What came of it is judged from the
records at the end (workers/report/drills.py).
"""

import heapq
import random
import threading
import time
from collections.abc import Container, Iterator

from torch import Tensor

from workers.checkpoint import finding, lease
from workers.checkpoint.manifest import Unreadable, read
from workers.cluster.link import bits_s
from workers.cluster.rendezvous import Cluster
from workers.config.faults import BITS, Fault, arrivals, planned
from workers.contract import Strategy
from workers.faults import bits, files, links, process
from workers.faults.messages import Messages, flipping
from workers.lab import Lab
from workers.passes.corruption import alike
from workers.report.records import Injected, Planned, Refused

NAMED_S = 2.5  # beside LAB_LOST_AFTER_S: until all tables agree, the words go round, and a busy machine
UNSURE_S = 1.5  # so much after LAB_LOST_AFTER_S a silence may be forgiven still
DATAGRAMS = "of what comes the heartbeats alone, since this kernel wants NET_ADMIN to drop what comes by TCP"
KINDS = {"gradient": "gradients", "weight": "weights"}


class Drills:
    """The drills of one rank."""

    def __init__(self, lab: Lab, cluster: Cluster) -> None:
        self.lab, self.cluster = lab, cluster
        self.entries = lab.config.planned_faults
        self.events = planned(self.entries, lab.config.seed, lab.world_size)
        self._timed_alike = {each.name for each in lab.mode.variants if each.build is not None}  # in step on all ranks
        self._made: set[int] = set()
        self._messages: Messages | None = None
        self._num_messages: dict[str, int] = {}  # of a step of each variant

    def begin(self) -> None:
        """From now on faults come: write down what should come of each, and begin to count seconds."""
        for event in self.events:
            self._plan(event)
        self.lab.on_step, self.lab.on_tensors = self.step, self.tensors
        threading.Thread(target=self._by_the_clock, name="drills", daemon=True).start()

    def step(self, step: int, variant: str) -> None:
        """A step begins: what comes at a step comes once, in the first variant; bits flip in each."""
        if variant in self._timed_alike:
            self.lab.stood(variant, [time.time()])
        for event in self.events:
            if event.flipped == "message" and event.rank == self.lab.rank and self._shows(variant, covered=False):
                self._listen(event, step, variant)
            elif event.step == step and not event.flipped and event.number not in self._made:
                self._make(event, step)

    def tensors(self, kind: str, variant: str, strategy: Strategy, step: int, shared: Container[str]) -> None:
        """A variant's gradients or weights are there, of which those in `shared` are on other ranks too."""
        if kind == "weights" and self._messages is not None:
            self._messages.close()
            self._num_messages[variant] = self._messages.count
            self._messages = None
        for event in self.events:
            if event.step == step and KINDS.get(event.flipped) == kind and event.rank == self.lab.rank:
                self._flip(event, kind, variant, strategy, shared)

    # --- what comes at a second ---

    def _by_the_clock(self) -> None:
        """Each event at its second, on every rank at about the same moment."""
        began = time.monotonic()
        for event in self._timed():
            time.sleep(max(0.0, began + (event.at_s or 0.0) - time.monotonic()))
            if event.number not in {each.number for each in self.events}:
                self._plan(event)
            self._make(event, self.lab.step)

    def _timed(self) -> Iterator[Fault]:
        seed, world_size = self.lab.config.seed, self.lab.world_size
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
        bound = NAMED_S + self.lab.config.lost_after_s
        bound = float(self.lab.config.audited_every or 1) if event.flipped else bound
        assert event.rank is not None
        outcome = outcome_of(event, self.lab.config.lost_after_s)
        self.lab.journal.write(
            Planned(event.number, event.label, event.kind, event.rank, outcome, bound, event.step)
        )  # fmt: skip

    def _note(self, event: Fault, step: int, variant: str = "", detail: str = "", outcome: str = "") -> None:
        self.lab.journal.write(Injected(event.number, self.lab.rank, step, variant, time.time(), detail, outcome))
        told = f": {detail}" if detail else ""
        self.lab.say(f"drill      {event.label}{f' in {variant}' if variant else ''}{told}", all_ranks=True)

    def _make(self, event: Fault, step: int) -> None:
        """This rank's part of an event."""
        self._made.add(event.number)
        mine = event.rank == self.lab.rank
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
                files.fill(self.lab.journal.open_files)
                self.lab.journal.say("drill      the disk is full from here on")

    def _cut(self, event: Fault, step: int, *, mine: bool) -> None:
        """The rank stops hearing, the others stop hearing it, or both."""
        undo = None
        if mine:
            whole = event.way == "out" or links.hear_nobody()
            self._note(event, step, detail="" if whole else DATAGRAMS)
            if event.way == "out" or not (whole or event.duration_s):
                links.send_nothing()
            undo = links.hear_again
        elif event.way != "in" and event.rank is not None:
            member = self.cluster.members[event.rank]
            undo = links.deafen_to(self.cluster.socket, (member.ip, member.udp_port))
        if undo is not None and event.duration_s is not None:
            threading.Timer(event.duration_s, undo).start()

    def _damage(self, event: Fault, step: int) -> None:
        """Flip a bit of the newest checkpoint, then look for one to go on from, as a resumed run does."""
        assert self.lab.journal.folder is not None
        (newest, *_) = finding.candidates(self.lab.journal.folder)
        name = files.damage(newest, list(read(newest).files), self._draw(event, ""))
        self._note(event, step, detail=f"{newest.name}/{name}")
        said: list[str] = []
        try:
            found = finding.newest_good(self.lab.journal.folder, said.append)
            lease.release(found.held if found else None)
        except Unreadable as error:
            said.append(str(error))
        for sentence in said[:1]:
            self.lab.journal.write(Refused(event.number, sentence))

    # --- bits ---

    def _flip(self, event: Fault, kind: str, variant: str, strategy: Strategy, shared: Container[str]) -> None:
        covered = [(name, tensor) for name, tensor in alike(strategy, kind) if name in shared]
        candidates = covered or held(strategy, kind)
        if not candidates or not self._shows(variant, covered=bool(covered)):
            self.lab.say(
                f"drill      {event.label}: not made in {variant}, where no check could see it", all_ranks=True
            )
            return
        bit, draw = self._drawn(event, variant)
        name, tensor = draw.choice(sorted(candidates, key=lambda each: each[0]))
        done = bits.flip(tensor, bit, draw)
        self._note(event, event.step or 0, variant, f"{kind}.{name}{done}", "named" if covered else "seen")

    def _shows(self, variant: str, *, covered: bool) -> bool:
        """Whether a check could see it: a copy on another rank, or one process that computes the same."""
        return covered or (self.lab.config.proof and variant not in self.lab.mode.by_torch)

    def _listen(self, event: Fault, step: int, variant: str) -> None:
        """Count the messages of the step before, and flip a bit of the last one: all of it is used, where of the first
        one, the embedding, no sample may need the row."""
        assert event.step is not None

        def told(op: str, done: bits.Flip) -> None:
            self._note(event, step, variant, f"{op}{done}")

        if step == event.step - 1:
            self._messages = Messages()
        elif step == event.step:
            change = flipping(*self._drawn(event, variant), told)
            self._messages = Messages(self._num_messages.get(variant, 1), change)

    def _drawn(self, event: Fault, variant: str) -> tuple[str, random.Random]:
        """The kind of bit, and what draws the rest."""
        draw = self._draw(event, variant)
        drawn = draw.choice(BITS)
        return event.bits or drawn, draw

    def _draw(self, event: Fault, variant: str) -> random.Random:
        return random.Random(f"{self.lab.config.seed} {event.number} {variant}")


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


def held(strategy: Strategy, kind: str) -> list[tuple[str, Tensor]]:
    """What this rank holds of `kind`, whole or in part, as it is trained on."""
    optimizer = getattr(strategy, "optimizer", None)
    groups = optimizer.param_groups if optimizer is not None else []
    parameters = [parameter for group in groups for parameter in group["params"]]
    found = [each.detach() if kind == "weights" else each.grad for each in parameters]
    return [
        (f"part {index}", tensor.to_local() if hasattr(tensor, "to_local") else tensor)
        for index, tensor in enumerate(found)
        if tensor is not None and tensor.numel()
    ]
