"""Save every LAB_CHECKPOINT_EVERY steps, before training continues, and keep the newest checkpoints.

A failed save does not end the run, which still has the last good one.
"""

import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import torch.distributed as dist

from distlab.contract import Strategy
from distlab.lab.checkpoint import locate, manifest, storage
from distlab.lab.checkpoint.manifest import Manifest, TrainingPosition
from distlab.lab.lab import Lab
from distlab.lab.report import records
from distlab.lab.report.units import human_bytes

KEPT = 2  # newest ones: if a run dies while it writes one, the one before is complete
PRINT_EVERY_S = 1.0
CONTROL = "tests/experiments/test_bugs.py::test_each_bug_fails_its_check"

LossParts = Mapping[str, list[float | None]]  # this rank's parts of the losses, by variant


class Saver:
    """Saves the variants of one timed pass. All ranks call `after`, at the same steps."""

    def __init__(
        self, lab: Lab, group: dist.ProcessGroup, strategies: Mapping[str, Strategy], position: TrainingPosition,
        loss_parts: LossParts,
    ) -> None:  # fmt: skip
        """`loss_parts` and `position` are updated by the training; `group` is a gloo group for saving alone."""
        assert lab.journal.folder is not None
        self.lab, self.group, self.strategies = lab, group, strategies
        self.position, self.loss_parts = position, loss_parts
        self.folder = lab.journal.folder / locate.FOLDER
        self._needed_bytes: int | None = None  # the same for every save of a run
        self._printed_at = 0.0

    def after(self, step: int) -> None:
        """Save if it is time, after all variants have done `step`."""
        every = self.lab.config.checkpoint_every
        assert every is not None
        if (step + 1) % every:
            return
        self.lab.at(step, "checkpoint")
        began_at = time.perf_counter()
        state, draft = state_of(self.strategies), manifest_of(self.lab, self.position, step + 1)
        if self._needed_bytes is None:
            self._needed_bytes = storage.needed_bytes(state, self.group)
        try:
            published = storage.write_checkpoint(
                self.folder, draft, state, self.group, self.loss_parts,
                needed_bytes=self._needed_bytes, shards_written=self.lab.mode.shards_written,
            )  # fmt: skip
        except storage.Unsaved as error:
            if self.lab.rank == 0:
                self._report_failure(step + 1, time.perf_counter() - began_at, str(error))
            return
        if self.lab.rank == 0:
            self._check(published, began_at)

    def _check(self, published: Manifest, began_at: float) -> None:
        """On rank 0, check that all files of the manifest exist, remove older checkpoints, and log it."""
        lab, step = self.lab, published.step
        faults = locate.damage(self.folder / published.name, published)
        if not faults:
            keep_last(self.folder, KEPT)
        seconds, size = time.perf_counter() - began_at, human_bytes(published.num_bytes)
        lab.journal.write(records.Saved(step, seconds, seconds, published.num_bytes, ""))
        found = faults[0] if faults else "all files exist, with the right checksums"
        lab.check("checkpoint", len(faults), 0, detail=f"step {step}: {found}", control=CONTROL)
        now = time.monotonic()
        if now - self._printed_at >= PRINT_EVERY_S:
            self._printed_at = now
            lab.say(f"checkpoint step {step}, {size}, training paused for {seconds:.2f} s")

    def _report_failure(self, step: int, seconds: float, error: str) -> None:
        self.lab.journal.write(records.Saved(step, seconds, seconds, 0, error))
        good = locate.candidates(self.folder)
        last = f"the last good one is of step {locate.step_of(good[0])}" if good else "there is none yet"
        self.lab.say(f"step {step} could not be written ({error}): the run continues; {last}", "checkpoint", at="quiet")
        self.lab.waive("checkpoint", error)


def state_of(strategies: Mapping[str, Strategy]) -> storage.State:
    """Return the states of all variants as one, under '<variant>/<name>'."""
    return {
        f"{variant}/{name}": tensor
        for variant, strategy in strategies.items()
        for name, tensor in strategy.state_dict().items()
    }


def manifest_of(lab: Lab, position: TrainingPosition, step: int) -> Manifest:
    """Return this rank's draft of the manifest after `step` steps."""
    start = lab.journal.records[0]
    assert isinstance(start, records.Start)
    epoch, batch = position.position(step)
    return Manifest(
        schema=manifest.SCHEMA, run_id=start.run_id, world_size=lab.world_size,
        settings=manifest.defining(lab.config), data=position.data, versions=start.versions,
        step=step, steps=dict(position.done), epoch=epoch, batch=batch, seen=list(position.seen),
        losses={name: list(values) for name, values in position.losses.items()},
        generators={str(lab.rank): manifest.generator_states(lab.device)},
        draws={str(lab.rank): manifest.next_draws(lab.device)}, files={},
    )  # fmt: skip


def keep_last(folder: Path, count: int) -> None:
    """Remove all checkpoints but the `count` newest, and those that another run is loading."""
    for path in locate.candidates(folder)[count:]:
        with suppress(OSError):  # a disk error: the checkpoint stays
            locate.remove(path)
