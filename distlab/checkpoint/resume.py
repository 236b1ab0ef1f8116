"""Going on: rank 0 chooses a checkpoint, every rank loads its part of it, and the run says from where.

Every wait for the others goes over the store, and each rank reads the files by itself: it takes what it needs from
whatever ranks wrote them, so another WORLD_SIZE is no special case.
"""

import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from distlab.checkpoint import checks, dcp, locate, manifest
from distlab.checkpoint.locate import FoundCheckpoint
from distlab.checkpoint.manifest import Manifest, Unreadable
from distlab.checkpoint.training_position import TrainingPosition
from distlab.config import ConfigError
from distlab.contract import Strategy
from distlab.lab import Lab
from distlab.report import records

CONTROL = "tests/checkpoint/test_drill.py::test_generators_that_are_not_given_back_are_seen"
NEWEST_CONTROL = "tests/checkpoint/test_proofs.py::test_a_newer_one_that_is_good_is_not_passed_over"


@dataclass(frozen=True)
class Checkpoints:
    """What a run has of checkpoints: the one to go on from, and the process group over which it saves, if it does."""

    resumed: FoundCheckpoint | None
    group: dist.ProcessGroup | None

    def missing(self, variants: Iterable[str]) -> dict[str, str]:
        """Which of `variants` the checkpoint that is resumed does not hold, and a sentence for each."""
        held = self.resumed.manifest.steps if self.resumed is not None else None
        return {
            name: f"the checkpoint that is resumed does not hold {name}"
            for name in variants
            if held is not None and name not in held
        }


def prepare(lab: Lab) -> Checkpoints:
    """Choose, and tidy up."""
    found = agree(lab) if lab.config.resume is not None else None
    if found is None and lab.config.resume is not None:
        for claim in ("resumed generators", "resumed samples", "newest checkpoint"):
            lab.waive(claim, "there is no checkpoint yet")
    if found is not None and lab.config.checkpoint_every is not None:
        done = found.manifest.step // lab.config.checkpoint_every
        for claim in ("checkpoint", "kept checkpoints"):
            lab.waive(claim, f"{done} of them were due before step {found.manifest.step}", times=done)
    if lab.rank == 0:
        tidy(lab, found)
    return Checkpoints(found, lab.hooks.side_group if lab.config.checkpoint_every is not None else None)


def agree(lab: Lab) -> FoundCheckpoint | None:
    """Rank 0's choice, on every rank; raises ConfigError on all where no checkpoint is good."""
    lab.at(0, "the choice of a checkpoint")
    choice: dict[str, str] = {}
    found: FoundCheckpoint | None = None
    if lab.rank == 0:
        try:
            found = locate.choose(lab.config, lambda text: lab.say(text, "checkpoint"))
            choice = {"folder": str(found.folder)} if found else {}
            if found is not None:
                hold_newest(lab, found)
        except ConfigError as error:
            choice = {"fault": error.faults[0]}
    choice = lab.exchange.share("checkpoint", choice)
    if "fault" in choice:
        raise ConfigError([choice["fault"]])
    if not choice:
        return None
    folder = Path(choice["folder"])
    held = locate.lock_for_reading(folder) if found is None else found.held
    lab.exchange.barrier("leases")  # until here rank 0's keeps it for all
    try:
        return FoundCheckpoint(folder, manifest.read(folder), held)
    except Unreadable as error:
        raise ConfigError([f"{folder} {error} on rank {lab.rank}: all ranks need the same folder of runs"]) from None


def hold_newest(lab: Lab, found: FoundCheckpoint) -> None:
    """No newer checkpoint than the one that was taken is whole and of these settings; on rank 0."""

    def good(folder: Path) -> bool:
        try:
            saved = manifest.read(folder)
        except Unreadable:
            return False
        return not locate.misfit(saved, lab.config) and not locate.damage(folder, saved)

    newer = checks.passed_over(locate.resume_path(lab.config), found.manifest.step, good)
    detail = f"step {found.manifest.step} was taken; newer and good: {', '.join(map(str, newer)) or 'none'}"
    lab.check("newest checkpoint", len(newer), 0, detail=detail, control=NEWEST_CONTROL)


def tidy(lab: Lab, found: FoundCheckpoint | None) -> None:
    """In the run's own folder: half-written checkpoints go, and what was passed over is put aside, for the steps come
    again."""
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


def resume(lab: Lab, strategies: Mapping[str, Strategy], course: TrainingPosition, found: FoundCheckpoint) -> None:
    """Fill all variants, and the generators of a rank that was there before; say where the run goes on."""
    saved = found.manifest
    for name, strategy in strategies.items():
        lab.at(course.first, f"the loading of {name}")
        load(strategy, name, found.folder, lab.group)
    locate.release(found.held)
    give_back_generators(lab, saved)
    if str(lab.rank) in saved.draws:
        detail = "the next random numbers, beside those that the checkpoint foretold"
        lab.check("resumed generators", wrongly_drawn(lab, saved), 0.0, detail=detail, control=CONTROL)
    epoch, _ = course.position(course.first)
    lab.say(f"resumed from epoch {epoch}, step {course.first} ({found.folder})", "resume")
    then, now = saved.versions.get("lab"), own_version(lab)
    if then != now:
        also = "weights may end otherwise than in a run that was never stopped"
        lab.say(f"the code has changed since, from version {then} to {now}: {also}", "resume")
    if lab.rank == 0:
        lab.journal.write(records.Resumed(epoch, course.first, str(found.folder)))


def load(strategy: Strategy, variant: str, folder: Path, group: dist.ProcessGroup) -> None:
    """Fill one strategy from the checkpoint in `folder`; raises dcp.Damaged."""
    state = strategy.state_dict()
    dcp.load({f"{variant}/{name}": held for name, held in state.items()}, folder, group)
    strategy.load_state_dict(state)


def give_back_generators(lab: Lab, saved: Manifest) -> None:
    """Go on with the random numbers of this rank, if there was such a rank."""
    for index, state in enumerate(saved.generators.get(str(lab.rank), [])):
        set_generator(index, state, lab.device)


def wrongly_drawn(lab: Lab, saved: Manifest) -> float:
    """How far this rank's next random numbers are from those that were foretold; they are given back after."""
    before, worst = generators(lab.device), 0.0
    for (device, state), foretold in zip(before, saved.draws[str(lab.rank)], strict=False):
        drawn = torch.rand(len(foretold), device=device, dtype=torch.float64).cpu()
        worst = max(worst, float((drawn - torch.tensor(foretold, dtype=torch.float64)).abs().max()))
        torch.set_rng_state(state) if device.type == "cpu" else torch.cuda.set_rng_state(state, device)
    return worst


def generators(device: torch.device) -> list[tuple[torch.device, torch.Tensor]]:
    """torch's generators on this rank and their states, the CPU's first."""
    found = [(torch.device("cpu"), torch.get_rng_state())]
    return found + ([(device, torch.cuda.get_rng_state(device))] if device.type == "cuda" else [])


def set_generator(index: int, state: str, device: torch.device) -> None:
    """Go on with the random numbers of generator `index`, the CPU's first."""
    tensor = torch.frombuffer(bytearray.fromhex(state), dtype=torch.uint8)
    if index == 0:
        torch.set_rng_state(tensor)
    elif device.type == "cuda":
        torch.cuda.set_rng_state(tensor, device)


def own_version(lab: Lab) -> str | None:
    """The hash of the sources that run now."""
    start = lab.journal.records[0]
    assert isinstance(start, records.Start)
    return start.versions.get("lab")
