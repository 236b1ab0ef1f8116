"""Drills: the faults of LAB_FAULTS, made when their moment comes, and what should come of each written down before.

Every rank has the same plan. As a step begins, or by a clock of its own, the rank that an event names makes it
(distlab/lab/faults/); where a link is to break one way, the others do their part. Bits flip within a step (below). What
came of it is judged from the records at the end (distlab/lab/report/fault_checks.py).
"""

import heapq
import random
import threading
import time
from collections.abc import Callable, Container, Iterator, Sequence

from torch import Tensor

from distlab.contract import Mode
from distlab.lab import faults
from distlab.lab.checkpoint import locate
from distlab.lab.checkpoint.manifest import Unreadable, read
from distlab.lab.cluster.join import Cluster
from distlab.lab.cluster.link import bits_s
from distlab.lab.config import Config
from distlab.lab.config.fault_spec import BITS, FaultSpec, arrivals, planned
from distlab.lab.faults import Messages, flipping
from distlab.lab.report.records import Injected, Planned, Refused, Stood
from distlab.lab.report.run_folder import Journal
from distlab.lab.verify.silent_corruption import alike

# Bits flip in a gradient once it is summed, in a weight once it is updated, in a message on its way.
#
# Where ranks hold copies the bit is of one of those, and the audit has to name it. Elsewhere a check of the timed
# steps, or one that the mode names (`Mode.watched`), has to fail, which may allow for roundings: so unless the text
# names a bit it is the highest of the exponent, of a tensor that is not all zeros.

KINDS = {"gradient": "gradients", "weight": "weights"}
Note = Callable[[FaultSpec, int, str, str, str], None]  # (event, step, variant, detail, outcome)


class Flips:
    """The flips of one rank; `note` writes down each as it is made."""

    def __init__(self, config: Config, mode: Mode, events: Sequence[FaultSpec], note: Note) -> None:
        self.config, self.mode, self.events, self.note = config, mode, events, note
        self._messages: Messages | None = None
        self._num_messages: dict[str, int] = {}  # of the last step of each variant that had any
        self._made: set[tuple[int, str]] = set()  # numbers of events, by variant: a step may be done again

    def step(self, step: int, variant: str) -> None:
        """A step begins: listen for the message that is to change, one at a time."""
        if self._messages is not None:  # of a step that a loss has ended
            self._messages.close()
            self._messages = None
        left = [each for each in self.events if each.flipped == "message" and (each.number, variant) not in self._made]
        if self._shows(variant, covered=False):
            if left:
                self._listen(min(left, key=lambda each: each.step or 0), step, variant)
            return
        for event in left:
            if event.step == step:
                self._made.add((event.number, variant))
                self.note(event, step, variant, "", "unseen")

    def tensors(self, kind: str, variant: str, strategy: object, step: int, shared: Container[str]) -> None:
        """A variant's gradients or weights are there, of which those in `shared` are on other ranks too."""
        if kind == "weights" and self._messages is not None:
            self._messages.close()
            if self._messages.count:
                self._num_messages[variant] = self._messages.count
            self._messages = None
        for event in self.events:
            if event.step == step and KINDS.get(event.flipped) == kind and (event.number, variant) not in self._made:
                self._made.add((event.number, variant))
                self._flip(event, kind, variant, strategy, shared)

    def _flip(self, event: FaultSpec, kind: str, variant: str, strategy: object, shared: Container[str]) -> None:
        covered = [(name, tensor) for name, tensor in alike(strategy, kind) if name in shared]
        candidates = covered or tensors_to_flip(strategy, kind)
        if not candidates or not self._shows(variant, covered=bool(covered)):
            self.note(event, event.step or 0, variant, "", "unseen")
            return
        bit, draw = self._drawn(event, variant, covered=bool(covered))
        name, tensor = draw.choice(sorted(candidates, key=lambda each: each[0]))
        done = faults.flip(tensor, bit, draw)
        self.note(event, event.step or 0, variant, f"{kind}.{name}{done}", "named" if covered else "seen")

    def _shows(self, variant: str, *, covered: bool) -> bool:
        """Whether a check could see it: a copy on another rank, or one process that computes the same."""
        return covered or bool(self.mode.watched) or (self.config.proof and variant not in self.mode.by_torch)

    def _listen(self, event: FaultSpec, step: int, variant: str) -> None:
        """Count the messages of each step, and from the event's step on flip a bit of the last one: all of it is used,
        where of the first one, the embedding, no sample may need the row. A step may have none: then one that has."""
        assert event.step is not None

        def told(op: str, done: faults.Flip) -> None:
            self._made.add((event.number, variant))
            self.note(event, step, variant, f"{op}{done}", "")

        known = self._num_messages.get(variant, 0)
        now = step >= event.step and known
        change = flipping(*self._drawn(event, variant, covered=False), told) if now else None
        self._messages = Messages(known, change)

    def _drawn(self, event: FaultSpec, variant: str, *, covered: bool) -> tuple[str, random.Random]:
        draw = draw_of(event, self.config.seed, variant)
        drawn = draw.choice(BITS)
        return event.bits or (drawn if covered else faults.HIGHEST), draw


def draw_of(event: FaultSpec, seed: int, variant: str = "") -> random.Random:
    """What draws all that the text of an event leaves out."""
    return random.Random(f"{seed} {event.number} {variant}")


def tensors_to_flip(strategy: object, kind: str) -> list[tuple[str, Tensor]]:
    """What this rank holds of `kind` and trains on, whole or in part, and is not all zeros; nothing of gradients that
    its update does not read. A strategy may say it by a method `own`, else its optimizer's parameters do."""
    own = getattr(strategy, "own", None)
    if own is not None:
        return [(name, tensor) for name, tensor in own(kind) if tensor.any()]
    optimizer = getattr(strategy, "optimizer", None)
    if kind == "gradients" and not getattr(strategy, "steps", True):
        return []
    groups = optimizer.param_groups if optimizer is not None else []
    parameters = [parameter for group in groups for parameter in group["params"]]
    found = [each.detach() if kind == "weights" else each.grad for each in parameters]
    local = [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in found if tensor is not None]
    return [(f"part {index}", tensor) for index, tensor in enumerate(local) if tensor.any()]


NAMED_S = 2.5  # beside LAB_LOST_AFTER_S: until all tables agree, the words go round, and a busy machine
UNSURE_S = 1.5  # so much after LAB_LOST_AFTER_S a silence may be forgiven still
HEARTBEATS = "heartbeats alone, since this kernel wants NET_ADMIN to drop what comes by TCP"


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
        began = time.monotonic()
        for event in self._timed():
            time.sleep(max(0.0, began + (event.at_s or 0.0) - time.monotonic()))
            if event.number not in {each.number for each in self.events}:
                self._plan(event)
            self._make(event, self._step)

    def _timed(self) -> Iterator[FaultSpec]:
        seed, world_size = self.config.seed, self.config.world_size
        again = [
            arrivals(entry, index, seed, world_size)
            for index, entry in enumerate(self.entries)
            if entry.every_s is not None
        ]
        once = sorted((each for each in self.events if each.at_s is not None), key=lambda each: each.at_s or 0.0)
        return heapq.merge(once, *again, key=lambda each: each.at_s or 0.0)

    # --- making them ---

    def _plan(self, event: FaultSpec) -> None:
        bound = NAMED_S + self.config.lost_after_s
        bound = float(self.config.audited_every or 1) if event.flipped else bound
        assert event.rank is not None
        outcome = outcome_of(event, self.config.lost_after_s)
        watched = list(self.mode.watched) if event.flipped else []
        self.journal.write(
            Planned(event.number, event.label, event.kind, event.rank, outcome, bound, event.step, watched)
        )  # fmt: skip

    def _note(self, event: FaultSpec, step: int, variant: str = "", detail: str = "", outcome: str = "") -> None:
        self.journal.write(Injected(event.number, self.rank, step, variant, time.time(), detail, outcome))
        told = f": {detail}" if detail else ""
        self.journal.say(f"fault      {event.label}{f' in {variant}' if variant else ''}{told}", "normal")

    def _make(self, event: FaultSpec, step: int) -> None:
        self._made.add(event.number)
        mine = event.rank == self.rank
        if event.kind == "cut":
            self._cut(event, step, mine=mine)
        elif event.kind == "corrupt_checkpoint" and mine:
            self._damage(event, step)
        elif mine:
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

    def _cut(self, event: FaultSpec, step: int, *, mine: bool) -> None:
        """The rank stops hearing the others, or being heard by them, or both."""
        if not mine:
            return
        self._mute(deaf=event.way != "out", mute=event.way != "in")
        # A filter drops acknowledgements too: after TCP's first timeout a rank that only hears nobody would be mute.
        line = self.cluster.line.connection if event.way == "in" else None
        whole = event.way == "out" or faults.hear_nobody(but=line)
        self._note(event, step, detail="" if whole else HEARTBEATS)
        if event.way == "out" or not (whole or event.duration_s):
            faults.send_nothing()
        if event.duration_s is not None:
            threading.Timer(event.duration_s, self._mend).start()

    def _mend(self) -> None:
        """A cut is over."""
        self._mute(deaf=False, mute=False)
        faults.hear_again()

    def _mute(self, *, deaf: bool, mute: bool) -> None:
        """Whether this rank hears and is heard over its connection to the server; the one that serves hears itself."""
        if self.cluster.server is not None:
            self.cluster.server.cut_off = deaf or mute
        else:
            self.cluster.line.deaf, self.cluster.line.mute = deaf, mute

    def _damage(self, event: FaultSpec, step: int) -> None:
        """Flip a bit of the newest checkpoint, then look for one to go on from, as a resumed run does."""
        assert self.journal.folder is not None
        (newest, *_) = locate.candidates(self.journal.folder)
        name = faults.damage(newest, list(read(newest).files), draw_of(event, self.config.seed))
        self._note(event, step, detail=f"{newest.name}/{name}")
        said: list[str] = []
        try:
            found = locate.newest_good(self.journal.folder, said.append)
            locate.release(found.held if found else None)
        except Unreadable as error:
            said.append(str(error))
        for sentence in said[:1]:
            self.journal.write(Refused(event.number, sentence))


def outcome_of(event: FaultSpec, lost_after_s: float) -> str:
    """What should come of an event, as distlab/lab/report/fault_checks.py names it."""
    if event.kind in ("slow_link", "slow_rank"):
        return "survived"
    if event.kind in ("pause", "cut") and event.duration_s is not None:
        sure = event.duration_s >= lost_after_s + UNSURE_S
        return "survived" if event.duration_s <= lost_after_s else "lost" if sure else "open"
    if event.way == "in":
        return "broken"
    return {"full_disk": "full", "corrupt_checkpoint": "refused", "flip": "seen"}.get(event.kind, "lost")
