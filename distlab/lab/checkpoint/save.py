"""When to save: every LAB_CHECKPOINT_EVERY steps, before the training goes on or beside it, and the last ones are kept.

A save beside the training (LAB_CHECKPOINT_ASYNC=1) holds it up for a copy of what this rank is going to write; one
thread writes the copy, over a process group of its own. There is one at a time: the next save waits for the one before.
A save that fails does not end the run, which goes on with the last good one.
"""

import math
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch.distributed as dist

from distlab.contract import Strategy
from distlab.lab.checkpoint import locate, manifest, storage
from distlab.lab.checkpoint.manifest import Manifest, TrainingPosition
from distlab.lab.lab import Lab
from distlab.lab.measure.tensors import hash_of
from distlab.lab.report import records
from distlab.lab.report.units import human_bytes

GRACE_S = 10.0  # a save ends by its group's timeout; a disk that hangs gets so much more
SAY_EVERY_S = 1.0
CONTROL = "tests/experiments/test_bugs.py::test_each_bug_fails_the_check_that_is_meant_for_it"
KEPT_CONTROL = "tests/lab/checkpoint/test_proofs.py::test_what_is_kept_are_the_newest_and_no_more"
STOOD_CONTROL = "tests/lab/checkpoint/test_proofs.py::test_a_save_that_says_nothing_of_what_it_held_up_is_seen"

Digests = dict[str, list[int]]  # of each entry of a state, a hash a part
Shares = Mapping[str, list[float | None]]  # this rank's shares of the losses, by variant


@dataclass
class Outcome:
    """How a save ended: `error` is empty if it was published, `faults` is what is wrong with what was."""

    step: int
    began_at: float
    held_s: float = 0.0
    seconds: float = 0.0
    num_bytes: int = 0
    error: str = ""
    faults: list[str] = field(default_factory=list)
    before: set[int] = field(default_factory=set)  # the steps of the checkpoints that were there, on rank 0
    kept: tuple[int, str] | None = None  # see wrongly_kept
    unforeseen: Exception | None = None


class Saver:
    """Saves the variants of one timed pass. All ranks call every method, at the same steps."""

    def __init__(
        self, lab: Lab, group: dist.ProcessGroup, strategies: Mapping[str, Strategy], course: TrainingPosition,
        shares: Shares,
    ) -> None:  # fmt: skip
        """`shares` and `course` go on while this saves; `group` is one of gloo's that nothing else uses."""
        assert lab.journal.folder is not None
        self.lab, self.group, self.strategies, self.course, self.shares = lab, group, strategies, course, shares
        self.folder = lab.journal.folder / locate.FOLDER
        self.published: Manifest | None = None
        self._plan: storage.Plan | None = None
        self._pending: tuple[threading.Thread, Outcome] | None = None
        self._said_at = 0.0

    def after(self, step: int) -> None:
        """All variants have done `step`: save, if it is time."""
        config = self.lab.config
        assert config.checkpoint_every is not None
        if (step + 1) % config.checkpoint_every:
            return
        self.finish()
        self.lab.at(step, "checkpoint")
        outcome = Outcome(step + 1, time.perf_counter())
        outcome.before = locate.listed_steps(self.folder) if self.lab.rank == 0 else set()
        state, draft = self._own_part(), manifest_of(self.lab, self.course, step + 1)
        written = digests(state)
        shares = {name: list(values) for name, values in self.shares.items()}
        if config.checkpoint_async:
            state = {name: storage.cloned(held) for name, held in state.items()}
        save = partial(self._save, draft, state, written, shares, outcome)
        thread = threading.Thread(target=save, name="checkpoint", daemon=True)
        self._pending = thread, outcome
        if config.checkpoint_async:
            thread.start()
        else:
            save()
        outcome.held_s = time.perf_counter() - outcome.began_at
        if not config.checkpoint_async:
            self.finish()

    def finish(self) -> None:
        """Wait for the save that is under way, if there is one, and say how it ended; raises TimeoutError if it does
        not."""
        if self._pending is None:
            return
        thread, outcome = self._pending
        self._pending = None
        if thread.ident is not None:
            waited_from, bound_s = time.perf_counter(), self.lab.config.collective_timeout_s + GRACE_S
            thread.join(bound_s)
            if thread.is_alive():
                raise TimeoutError(
                    f"the checkpoint of step {outcome.step} was not written {bound_s:g} s after the next one was due"
                )
            outcome.held_s += time.perf_counter() - waited_from
        if outcome.unforeseen is not None:
            raise outcome.unforeseen
        if self.lab.rank == 0:
            self._report(outcome)

    def check_standing(self, stood_s: float) -> None:
        """Hold what the saves say that they held the training up for against the `stood_s` that its loop saw."""
        if self.lab.rank == 0:
            told = [each.held_s for each in self.lab.journal.records if isinstance(each, records.Saved)]
            off = unaccounted_s(stood_s, sum(told))
            detail = f"the loop stood {stood_s:.3f} s in {len(told)} saves, which say {sum(told):.3f} s"
            allowed = allowed_s(stood_s)
            self.lab.check("standing still", off, allowed, detail=detail, unit="s", control=STOOD_CONTROL)

    def _own_part(self) -> storage.State:
        """What this rank writes of all variants: views of what is trained on."""
        state = state_of(self.strategies)
        if self._plan is None:
            self._plan = storage.plan(state, self.group)
        return {name: held for name, held in state.items() if name in self._plan.mine}

    def _save(self, draft: Manifest, state: storage.State, written: Digests, shares: Shares, outcome: Outcome) -> None:
        """Write, verify and tidy up; on a thread of its own beside the training, so nothing is said here."""
        config = self.lab.config
        assert self._plan is not None
        try:
            published = storage.write_checkpoint(
                self.folder, draft, state, self.group, shares,
                needed_bytes=self._plan.total_bytes, shards_written=self.lab.mode.shards_written,
            )  # fmt: skip
            outcome.num_bytes = published.num_bytes
            final = self.folder / published.name
            others = storage.together(self.group, lambda: unlike(state, written, final, self.group))
            if self.lab.rank == 0:
                outcome.faults = locate.damage(final, published)
                for rank, names in enumerate(others):
                    outcome.faults += [f"holds another {name} than rank {rank} saved" for name in names]
                if not outcome.faults:
                    keep_last(self.folder, config.checkpoint_keep)
                    outcome.kept = wrongly_kept(self.folder, outcome.before, outcome.step, config.checkpoint_keep)
            self.published = published
        except storage.Unsaved as error:
            outcome.error = str(error)
        except Exception as error:
            outcome.unforeseen = error
        outcome.seconds = time.perf_counter() - outcome.began_at

    def _report(self, outcome: Outcome) -> None:
        lab, step = self.lab, outcome.step
        lab.journal.write(records.Saved(step, outcome.seconds, outcome.held_s, outcome.num_bytes, outcome.error))
        if outcome.error:
            good = locate.candidates(self.folder)
            last = f"the last good one is step {locate.step_of(good[0])}" if good else "there is none yet"
            told = f"step {step} could not be written ({outcome.error}): the run continues, {last}"
            lab.say(told, "checkpoint", at="quiet")
            for claim in ("checkpoint", "kept checkpoints"):
                lab.waive(claim, outcome.error)
            return
        found = outcome.faults[0] if outcome.faults else "every file is there, and its checksum right"
        detail = f"step {step}: {found}"
        lab.check("checkpoint", len(outcome.faults), 0, detail=detail, control=CONTROL)
        if outcome.kept is not None:
            wrong, detail = outcome.kept
            wrong += step % (lab.config.checkpoint_every or 1) > 0  # saved at another step than was asked for
            lab.check("kept checkpoints", wrong, 0, detail=detail, control=KEPT_CONTROL)
        now = time.monotonic()
        if now - self._said_at >= SAY_EVERY_S:
            self._said_at = now
            size, stood_s = human_bytes(outcome.num_bytes), outcome.held_s
            lab.say(f"checkpoint step {step}, {size} in {outcome.seconds:.2f} s, training paused for {stood_s:.2f} s")


def state_of(strategies: Mapping[str, Strategy]) -> storage.State:
    """The states of all variants as one, under '<variant>/<name>'."""
    return {
        f"{variant}/{name}": held
        for variant, strategy in strategies.items()
        for name, held in strategy.state_dict().items()
    }


def manifest_of(lab: Lab, course: TrainingPosition, step: int) -> Manifest:
    """What this rank knows of the checkpoint after `step` steps."""
    start = lab.journal.records[0]
    assert isinstance(start, records.Start)
    epoch, batch = course.position(step)
    return Manifest(
        schema=manifest.SCHEMA, run_id=start.run_id, world_size=lab.world_size,
        settings=manifest.defining(lab.config), data=course.data, versions=start.versions,
        step=step, steps=dict(course.done), epoch=epoch, batch=batch, seen=list(course.seen),
        losses={name: list(values) for name, values in course.losses.items()},
        generators={str(lab.rank): manifest.generator_states(lab.device)},
        draws={str(lab.rank): manifest.next_draws(lab.device)}, files={},
    )  # fmt: skip


def keep_last(folder: Path, count: int) -> None:
    """Remove all checkpoints but the `count` newest, and those that another run is loading."""
    for path in locate.candidates(folder)[count:]:
        with suppress(OSError):  # a disk's own trouble: the checkpoint stays
            locate.remove(path)


# What a save claims beside the checksums of its files, each looked at by another way than it was made.
#
# what was written   a digest of each tensor, taken while the training stands still, is that of what the disk gives
#                    back: a copy that still belongs to the training has moved on by the time that it is written
# what is kept       the newest of the checkpoints that a folder lists, and no more of them than were asked for
# standing still     what the saves say that they held the training up for is what its loop saw

MOST_BYTES = 64 << 20  # that are read back at once, beside what is trained
# What the loop sees of a save beyond what it is held up for: a record and lines of the log, on a machine that is busy.
LOG_S, LOG_SHARE = 0.5, 0.2


def digests(state: storage.State) -> Digests:
    return {name: [hash_of(part) for part in storage.parts(held)] for name, held in state.items()}


def unlike(state: storage.State, wanted: Digests, folder: Path, group: dist.ProcessGroup | None) -> list[str]:
    """The entries of which `folder` gives something else back than was `wanted`."""
    wrong = []
    for names in bundles(state):
        again = {name: storage.blank(state[name]) for name in names}
        try:
            storage.load_state(again, folder, group)
        except (storage.Damaged, OSError):  # which the checksums of the files tell
            continue
        found = digests(again)
        wrong += [name for name in names if found[name] != wanted[name]]
    return wrong


def bundles(state: storage.State) -> Iterator[list[str]]:
    """The names, some at a time, so that what is read at once is bounded."""
    names: list[str] = []
    nbytes = 0
    for name, held in state.items():
        names.append(name)
        nbytes += storage.num_bytes(held)
        if nbytes >= MOST_BYTES:
            yield names
            names, nbytes = [], 0
    if names:
        yield names


def wrongly_kept(folder: Path, before: Collection[int], saved: int, keep: int) -> tuple[int, str]:
    """How many checkpoints are missing or should be gone after the save of `saved`, beside what was there `before`;
    what another run reads may stay."""
    wanted, found = sorted({*before, saved})[-keep:], locate.listed_steps(folder)
    missing = sorted(set(wanted) - found)
    surplus = [step for step in found - set(wanted) if not locate.is_held(folder / manifest.folder_name(step))]
    detail = f"after step {saved} there are {sorted(found)}, of which the newest {keep} are kept"
    return len(missing) + len(surplus), detail


def allowed_s(stood_s: float) -> float:
    """How much of what the loop stood may be in no save."""
    return LOG_S + LOG_SHARE * stood_s


def unaccounted_s(stood_s: float, held_s: float) -> float:
    """Seconds that the loop stood in the saves beyond what these say, or the other way; infinite if more was said than
    there was."""
    return math.inf if held_s > stood_s * (1 + 1e-9) else stood_s - held_s
