"""The proof of a resume: stopped after step 0 and resumed, steps 1 and 2 end in the weights of a run that was never
stopped.

In float64 and on the proof's data, whose epoch has two batches, so that the stop is in the middle of one and the second
epoch begins behind it. The strategy that resumes is a new one that began from other weights: what the checkpoint does
not give back stays wrong. It goes the way of a real resume, file by file: DCP, manifest, position. All that is ours has
to be equal to the bit; PyTorch's DDP lays its buckets out anew after its first step, and so sums in another order.
"""

import shutil
from collections.abc import Iterable

import torch
import torch.distributed as dist

from distlab.checkpoint import locate, resume, storage
from distlab.checkpoint.manifest import Manifest
from distlab.checkpoint.save import manifest_of, state_of
from distlab.checkpoint.training_position import TrainingPosition
from distlab.config import Config
from distlab.contract import Build, Strategy
from distlab.lab import Lab
from distlab.measure.tensors import difference

STEPS = 3
TOLERANCE = 1e-12  # for PyTorch's own
CONTROL = "tests/checkpoint/test_drill.py::test_what_is_not_given_back_is_seen"


def drill(lab: Lab, name: str, build: Build, settings: Iterable[Config], group: dist.ProcessGroup) -> None:
    """Check one variant under each of `settings`, saved over `group`."""
    worst, wrongly_seen, wrongly_drawn = 0.0, 0, 0.0
    for config in settings:
        lab.at(0, f"drill of {name}")
        try:
            difference, wrong, drawn = stop_and_go(lab, name, build, config, group)
        except storage.Unsaved as error:
            lab.say(f"whether {name} resumes rightly is not proven: nothing can be written ({error})", "checkpoint")
            for claim in ("resumed generators", "resume", "resumed samples"):
                lab.waive(claim, str(error), name)
            return
        worst, wrongly_seen, wrongly_drawn = max(worst, difference), max(wrongly_seen, wrong), max(wrongly_drawn, drawn)
    detail = "the next random numbers after a resume, beside those that the checkpoint foretold"
    lab.check("resumed generators", wrongly_drawn, 0.0, variant=name, detail=detail, control=resume.CONTROL)
    if lab.rank == 0:
        lab.check("resume", worst, TOLERANCE if name in lab.mode.by_torch else 0.0, variant=name, control=CONTROL)
        detail = f"{STEPS} steps, resumed after the first; samples that were not seen exactly once an epoch"
        lab.check("resumed samples", wrongly_seen, 0, variant=name, detail=detail, control=CONTROL)


def stop_and_go(
    lab: Lab, name: str, build: Build, config: Config, group: dist.ProcessGroup
) -> tuple[float, int, float]:
    """The largest difference of a weight, on rank 0, the samples that were wrongly seen, and how far the random numbers
    are."""
    assert lab.journal.folder is not None
    # The next start tidies it away, should this one be killed.
    folder = lab.journal.folder / locate.FOLDER / ".step-drill"
    batches = lab.batches(torch.float64, proof=True)
    strategy = build(lab.mode.model(config, config.seed).to(lab.device, torch.float64), lab.mesh, config)
    course = TrainingPosition(batches, [name])
    try:
        train(lab, name, strategy, course, range(1))
        state = state_of({name: strategy})
        total_bytes = storage.plan(state, group).total_bytes
        saved = storage.write_checkpoint(
            folder, manifest_of(lab, course, 1), state, group, {name: []}, needed_bytes=total_bytes
        )
        train(lab, name, strategy, course, range(1, STEPS))
        wanted = {label: tensor.clone() for label, tensor in strategy.full("weights") if lab.rank == 0}
        del strategy, state
        drawn = drawn_after(lab, saved)
        other = build(lab.mode.model(config, config.seed + 1).to(lab.device, torch.float64), lab.mesh, config)
        resumed = TrainingPosition(batches, [name], saved, lab.mode.resumed_batch)
        resume.load(other, name, folder / saved.name, lab.group)
    finally:
        lab.exchange.barrier(f"drill of {name}")
        if lab.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
    train(lab, name, other, resumed, range(resumed.first, STEPS))
    off = difference(other.full("weights"), wanted if lab.rank == 0 else None)
    return off, resumed.wrongly_seen(), drawn


def drawn_after(lab: Lab, saved: Manifest) -> float:
    """How far a resumed rank's random numbers are from the foretold ones; the run's own stream goes on as it was."""
    kept = storage.generator_states(lab.device)
    try:
        torch.rand(1, device=lab.device)  # what a run that goes on draws, and one that resumes must not see
        torch.rand(1)
        resume.give_back_generators(lab, saved)
        return resume.wrongly_drawn(lab, saved)
    finally:
        for index, state in enumerate(kept):
            resume.set_generator(index, state, lab.device)


def train(lab: Lab, name: str, strategy: Strategy, course: TrainingPosition, steps: range) -> None:
    """Steps as the timed pass makes them, noted in `course`."""
    for step in steps:
        strategy.backward(lab.dealt(course.batches, course.data_step(step)))
        with course.updating(name):
            strategy.update()
        course.passed(step)
