"""Resume a run: rank 0 chooses a checkpoint, every rank loads its part, and the run logs its step.

Ranks wait for each other through the store, and each reads the files by itself: it loads what it needs from the files
of any rank, so another WORLD_SIZE is no special case.
"""

import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from distlab.contract import Build, Strategy
from distlab.lab.checkpoint import locate, manifest, storage
from distlab.lab.checkpoint.locate import FoundCheckpoint
from distlab.lab.checkpoint.manifest import Manifest, TrainingPosition, Unreadable
from distlab.lab.checkpoint.save import manifest_of, state_of
from distlab.lab.config import Config, ConfigError
from distlab.lab.lab import Lab
from distlab.lab.measure.tensors import difference, largest_difference
from distlab.lab.report import records

CONTROL = "tests/lab/checkpoint/test_drill.py::test_generators_that_are_not_restored_fail"
NEWEST_CONTROL = "tests/lab/checkpoint/test_proofs.py::test_newer_good_checkpoints_are_found"


@dataclass(frozen=True)
class Checkpoints:
    """A run's checkpoints: the one to resume from, and the process group for saving, if any."""

    resumed: FoundCheckpoint | None
    group: dist.ProcessGroup | None

    def missing(self, variants: Iterable[str]) -> dict[str, str]:
        """Return which `variants` the resumed checkpoint lacks, with a sentence for each."""
        saved_steps = self.resumed.manifest.steps if self.resumed is not None else None
        return {
            name: f"the resumed checkpoint has no {name}"
            for name in variants
            if saved_steps is not None and name not in saved_steps
        }


def prepare(lab: Lab) -> Checkpoints:
    """Choose a checkpoint, and remove partial ones."""
    found = agree(lab) if lab.config.resume is not None else None
    if found is None and lab.config.resume is not None:
        for claim in ("resumed generators", "resumed samples", "newest checkpoint"):
            lab.waive(claim, "there is no checkpoint yet")
    if found is not None and lab.config.checkpoint_every is not None:
        done = found.manifest.step // lab.config.checkpoint_every
        lab.waive("checkpoint", f"{done} checkpoints were due before step {found.manifest.step}", times=done)
    if lab.rank == 0:
        tidy(lab, found)
    return Checkpoints(found, lab.hooks.side_group if lab.config.checkpoint_every is not None else None)


def agree(lab: Lab) -> FoundCheckpoint | None:
    """Return rank 0's choice on every rank; raises ConfigError on all if no checkpoint is good."""
    lab.at(0, "the choice of a checkpoint")
    choice: dict[str, str] = {}
    found: FoundCheckpoint | None = None
    if lab.rank == 0:
        try:
            found = locate.choose(lab.config, lambda text: lab.say(text, "checkpoint", at="normal"), lab.mode.formerly)
            choice = {"folder": str(found.folder)} if found else {}
            if found is not None:
                check_newest(lab, found)
        except ConfigError as error:
            choice = {"fault": error.faults[0]}
    choice = lab.exchange.share("checkpoint", choice)
    if "fault" in choice:
        raise ConfigError([choice["fault"]])
    if not choice:
        return None
    folder = Path(choice["folder"])
    lock = locate.lock_for_reading(folder) if found is None else found.lock
    lab.exchange.barrier("leases")  # until here rank 0's lock protects it for all
    try:
        return FoundCheckpoint(folder, manifest.read(folder), lock).with_current_names(lab.mode.formerly)
    except Unreadable as error:
        raise ConfigError([f"{folder} {error} on rank {lab.rank}: all ranks need the same runs folder"]) from None


def check_newest(lab: Lab, found: FoundCheckpoint) -> None:
    """Check on rank 0 that no newer checkpoint is complete and fits these settings."""

    def good(folder: Path) -> bool:
        try:
            saved = manifest.read(folder)
        except Unreadable:
            return False
        return not locate.misfit(saved, lab.config, lab.mode.formerly) and not locate.damage(folder, saved)

    newer = locate.newer_good_steps(locate.resume_path(lab.config), found.manifest.step, good)
    detail = f"step {found.manifest.step} was chosen; newer good ones: {', '.join(map(str, newer)) or 'none'}"
    lab.check("newest checkpoint", len(newer), 0, detail=detail, control=NEWEST_CONTROL)


def tidy(lab: Lab, found: FoundCheckpoint | None) -> None:
    """In the run's own folder remove partial checkpoints, and put skipped ones aside, since their steps are
    repeated."""
    assert lab.journal.folder is not None
    own = lab.journal.folder / locate.FOLDER
    for path in own.glob(".step-*"):
        shutil.rmtree(path, ignore_errors=True)
    if found is None or found.folder.parent.resolve() != own.resolve():
        return
    for path in locate.candidates(own):
        if locate.step_of(path) > found.manifest.step:
            aside = path.with_name(f"damaged-{path.name}")
            shutil.rmtree(aside, ignore_errors=True)
            path.rename(aside)


def resume(lab: Lab, strategies: Mapping[str, Strategy], position: TrainingPosition, found: FoundCheckpoint) -> None:
    """Load all variants, and the generators of a rank that existed before; log the step."""
    saved = found.manifest
    for name, strategy in strategies.items():
        lab.at(position.first, f"the loading of {name}")
        load(strategy, found.saved_as.get(name, name), found.folder, lab.group)
    locate.release(found.lock)
    restore_generators(lab, saved)
    if str(lab.rank) in saved.draws:
        detail = "the next random numbers, compared with those in the checkpoint"
        lab.check("resumed generators", wrongly_drawn(lab, saved), 0.0, detail=detail, control=CONTROL)
    epoch, _ = position.position(position.first)
    lab.say(f"resumed from epoch {epoch}, step {position.first} ({found.folder})", "resume", at="normal")
    start = lab.journal.records[0]
    assert isinstance(start, records.Start)
    then, now = saved.versions.get("lab"), start.versions.get("lab")
    if then != now:
        effect = "the weights may differ from those of an uninterrupted run"
        lab.say(f"the code has changed from version {then} to {now}: {effect}", "resume", at="normal")
    if lab.rank == 0:
        lab.journal.write(records.Resumed(epoch, position.first, str(found.folder)))


def load(strategy: Strategy, variant: str, folder: Path, group: dist.ProcessGroup) -> None:
    """Load one strategy from the checkpoint's `variant`; raises storage.Damaged."""
    state = strategy.state_dict()
    storage.load_state({f"{variant}/{name}": tensor for name, tensor in state.items()}, folder, group)
    strategy.load_state_dict(state)


def restore_generators(lab: Lab, saved: Manifest) -> None:
    """Restore this rank's generators, if the rank existed before."""
    manifest.set_generators(saved.generators.get(str(lab.rank), []), lab.device)


def wrongly_drawn(lab: Lab, saved: Manifest) -> float:
    """Return how far this rank's next random numbers are from the stored ones; restores the generators."""
    worst = 0.0
    for generator, expected in zip(manifest.generators(lab.device), saved.draws[str(lab.rank)], strict=False):
        before = generator.get_state()
        drawn = torch.rand(len(expected), device=generator.device, dtype=torch.float64).cpu()
        generator.set_state(before)
        worst = max(worst, largest_difference(drawn, torch.tensor(expected, dtype=torch.float64)))
    return worst


# The proof of a resume: a run stopped after step 0 and resumed for steps 1 and 2 ends in the weights of an
# uninterrupted one.
#
# In float64 and on the proof's data, whose epoch has two batches, so that the stop is in the middle of one and the
# second epoch begins after it. A new strategy with other initial weights resumes, so state that the checkpoint does not
# restore stays wrong. It uses the code of a real resume: DCP, manifest, position. Our variants must be bitwise equal;
# PyTorch's DDP rebuilds its buckets after its first step, and so sums in another order.

STEPS = 3
TOLERANCE = 1e-12  # for PyTorch's own
DRILL_CONTROL = "tests/lab/checkpoint/test_drill.py::test_state_that_is_not_restored_fails"


def prove_resume(lab: Lab, name: str, build: Build, settings: Iterable[Config], group: dist.ProcessGroup) -> None:
    """Check one variant under each of `settings`, saved over `group`."""
    worst, seen, drawn = 0.0, 0, 0.0
    for config in settings:
        lab.at(0, f"resume test of {name}")
        try:
            found = stop_and_resume(lab, name, build, config, group)
        except storage.Unsaved as error:
            lab.say(f"the resume of {name} is not tested, because no checkpoint can be written ({error})", "checkpoint")
            for claim in ("resumed generators", "resume", "resumed samples"):
                lab.waive(claim, str(error), name)
            return
        worst, seen, drawn = max(worst, found[0]), max(seen, found[1]), max(drawn, found[2])
    detail = "the next random numbers after a resume, compared with those in the checkpoint"
    lab.check("resumed generators", drawn, 0.0, variant=name, detail=detail, control=CONTROL)
    if lab.rank == 0:
        lab.check("resume", worst, TOLERANCE if name in lab.mode.by_torch else 0.0, variant=name, control=DRILL_CONTROL)
        detail = f"{STEPS} steps, resumed after the first; samples not used exactly once per epoch"
        lab.check("resumed samples", seen, 0, variant=name, detail=detail, control=DRILL_CONTROL)


def stop_and_resume(
    lab: Lab, name: str, build: Build, config: Config, group: dist.ProcessGroup
) -> tuple[float, int, float]:
    """Return rank 0's largest weight difference, the number of wrongly used samples, and the difference of random
    numbers."""
    assert lab.journal.folder is not None
    # The next start removes it if this one is killed.
    folder = lab.journal.folder / locate.FOLDER / ".step-drill"
    batches = lab.batches(torch.float64, proof=True)
    strategy = build(lab.mode.model(config, config.seed).to(lab.device, torch.float64), lab.mesh, config)
    position = TrainingPosition(batches, [name])
    try:
        train(lab, name, strategy, position, range(1))
        state = state_of({name: strategy})
        needed = storage.needed_bytes(state, group)
        draft = manifest_of(lab, position, 1)
        saved = storage.write_checkpoint(folder, draft, state, group, {name: []}, needed_bytes=needed)
        train(lab, name, strategy, position, range(1, STEPS))
        wanted = {label: tensor.clone() for label, tensor in strategy.full("weights") if lab.rank == 0}
        del strategy, state
        drawn = drawn_after(lab, saved)
        other = build(lab.mode.model(config, config.seed + 1).to(lab.device, torch.float64), lab.mesh, config)
        resumed = TrainingPosition(batches, [name], saved, lab.mode.resumed_batch)
        load(other, name, folder / saved.name, lab.group)
    finally:
        lab.exchange.barrier(f"resume test of {name}")
        if lab.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
    train(lab, name, other, resumed, range(resumed.first, STEPS))
    off = difference(other.full("weights"), wanted if lab.rank == 0 else None)
    return off, resumed.wrongly_seen(), drawn


def drawn_after(lab: Lab, saved: Manifest) -> float:
    """Return how far a resumed rank's random numbers are from the stored ones; restores the run's stream."""
    kept = manifest.generator_states(lab.device)
    try:
        torch.rand(1, device=lab.device)  # changes the stream; a resumed run must not be affected
        torch.rand(1)
        restore_generators(lab, saved)
        return wrongly_drawn(lab, saved)
    finally:
        manifest.set_generators(kept, lab.device)


def train(lab: Lab, name: str, strategy: Strategy, position: TrainingPosition, steps: range) -> None:
    """Train steps like the timed pass, recorded in `position`."""
    for step in steps:
        strategy.backward(lab.microbatches(position.batches, position.data_step(step)))
        strategy.update()
        position.done[name] += 1
        position.finish_step(step)
