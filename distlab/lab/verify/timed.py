"""The timed pass: LAB_STEPS steps in LAB_DTYPE, with variants interleaved so that changes of the machine affect all.

It is the training that a checkpoint saves and a resumed run continues. Strategies are created anew, so that none
inherits state from the proof.
"""

import hashlib
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from distlab.contract import Build, Held, Strategy
from distlab.lab.checkpoint.manifest import TrainingPosition
from distlab.lab.lab import Lab
from distlab.lab.measure.tensors import raw
from distlab.lab.measure.timeline import Clock, Lap, align
from distlab.lab.report import records
from distlab.lab.verify.audit import Curves, TimedPassChecks
from distlab.lab.verify.counted import WARMUP_STEPS
from distlab.lab.verify.first_step import observed_calls, write_first_step, write_inputs, write_parameters
from distlab.lab.verify.records import Chronicle, Drawn, record
from distlab.lab.verify.silent_corruption import Corruption
from distlab.lab.workload.data import Batches
from distlab.techniques.collectives.phases import phase, recorded, slowed

if TYPE_CHECKING:
    from distlab.lab.checkpoint.resume import Checkpoints


class Stopwatch:
    """Wall and CPU seconds, parts of the loss and marks of each variant's steps on this rank."""

    def __init__(self, names: list[str], clock: Clock, logged: Collection[str] = ()) -> None:
        self.clock, self.logged = clock, logged
        self.laps: dict[str, list[Lap]] = {name: [] for name in names}
        self.loss_parts: dict[str, list[float | None]] = {name: [] for name in names}
        self.chronicle = Chronicle(names)
        self._unshared: str | None = None  # the variant whose last loss part the other ranks do not know yet

    def step(
        self, name: str, strategy: Strategy, lab: Lab, position: TrainingPosition, step: int, corruption: Corruption
    ) -> None:  # fmt: skip
        """Run one step, from its first forward to its update; all ranks begin together."""
        logged = step == position.first and name in self.logged
        with (
            observed_calls(strategy, enabled=logged) as observed, recorded(lab.device) as spans,
            slowed(lab.config.slowed_to),
        ):  # fmt: skip
            microbatches = lab.microbatches(position.batches, position.data_step(step))
            self._meet(lab, position, f"step {step} of {name}")
            lab.begin_step(step, name)
            if lab.device.type == "cuda":  # on a shared GPU, loaded data may arrive after the launch
                torch.cuda.synchronize(lab.device)
            with Lap() as lap:
                loss_part = strategy.backward(microbatches)
                corruption.hash("gradients", name, strategy, step)
                with phase("optimizer"):
                    strategy.update()
                position.done[name] += 1
                corruption.hash("weights", name, strategy, step)
                if lab.device.type == "cuda":
                    torch.cuda.synchronize(lab.device)
        self.chronicle.add(name, step, spans)
        self.laps[name].append(lap)
        self.loss_parts[name].append(None if loss_part is None else loss_part.item())
        self._unshared = name
        if observed is not None:
            write_first_step(lab, name, step, strategy, spans, observed, self.clock, self.loss_parts[name][-1])
        lab.stepped()

    def _meet(self, lab: Lab, position: TrainingPosition, name: str) -> None:
        """Wait at a barrier, where ranks exchange their last part of the loss for their logs."""
        variant = self._unshared
        everyone = lab.exchange.everyone(name, None if variant is None else [self.loss_parts[variant][-1]])
        if variant is not None:
            position.record_loss(variant, everyone)

    def write(self, lab: Lab) -> None:
        """Write the seconds of all steps but the first ones, and the times by class."""
        for name, laps in self.laps.items():
            kept = laps[WARMUP_STEPS:] if len(laps) > WARMUP_STEPS else laps
            lab.journal.write(records.Steps(name, [lap.wall_s for lap in kept], [lap.cpu_s for lap in kept]))
            if laps:
                lab.journal.write(records.Profile(name, self.chronicle.profile(name)))


def time_steps(
    lab: Lab, variants: Mapping[str, Build], ends: Mapping[str, int], references: Mapping[str, Held],
    checkpoints: "Checkpoints | None" = None,
) -> tuple[dict[str, float | None], dict[str, Drawn]]:  # fmt: skip
    """Train all variants in turn, each up to where it `ends`, compared with one process or as `references` says.

    Return each variant's bubble on rank 0, and what this rank sends in its drawn step.
    """
    dtype = getattr(torch, lab.config.dtype)
    batches = lab.batches(dtype)
    if lab.config.slow_rank is not None:
        slow, speed = lab.config.slow_rank.split(":")
        lab.say(
            f"rank {slow} runs at {speed} of its speed: after each pass it sleeps in proportion to the measured time",
            "slowed",
        )
    lab.at(0, "the construction of all variants")
    strategies = {name: build(lab.model(dtype), lab.mesh, lab.config) for name, build in variants.items()}
    position = begun(lab, batches, strategies, checkpoints)
    checks = TimedPassChecks(lab, position, strategies, ends, dtype, references)
    corruption = Corruption(lab, strategies, lab.config.audit_every)
    steps = range(position.first, lab.config.steps)
    clock = align(lab.group)
    lab.journal.write(records.Clock(clock.offset_s, clock.uncertainty_s))
    watch = Stopwatch(list(variants), clock, logged_variants(lab, variants))
    if steps:
        write_inputs(lab, batches, position.data_step(position.first))
    with saving(lab, strategies, position, watch.loss_parts, checkpoints) as passed:
        for step in steps:
            for name in rotated(list(variants), step):
                # A rank that saved by itself may have stopped between two variants.
                if position.done[name] == step < ends[name]:
                    with checks.audit.around(name, strategies[name], step, position.data_step(step)) as loss_parts:
                        watch.step(name, strategies[name], lab, position, step, corruption)
                        loss_parts.append(watch.loss_parts[name][-1])
                    corruption.compare(name, step)
            passed(step)
            if step == position.first:
                write_parameters(lab, {name: strategies[name] for name in watch.logged})
    watch.write(lab)
    checks.decide(strategies, write_losses(lab, checks.losses, position, watch.loss_parts), watch.loss_parts)
    corruption.decide()
    if checkpoints is not None:
        write_digests(lab, strategies)
    if not steps:
        return {}, {}
    return watch.chronicle.bubbles(lab, clock), record(lab, strategies, position)


def logged_variants(lab: Lab, variants: Mapping[str, Build]) -> list[str]:
    """Return the variants whose first step is logged: the headline, or the first by hand; all with LAB_LOG=full."""
    if lab.config.log == "full":
        return list(variants)
    return [name for name in (lab.mode.headline[0], *lab.mode.by_hand, *variants) if name in variants][:1]


def begun(
    lab: Lab, batches: Batches, strategies: dict[str, Strategy], checkpoints: "Checkpoints | None"
) -> TrainingPosition:
    """Return the position at step 0, or at LAB_RESUME's checkpoint, with the strategies in that state."""
    found = checkpoints.resumed if checkpoints is not None else None
    position = TrainingPosition(batches, strategies, found.manifest if found else None, lab.mode.resumed_batch)
    if found is not None:
        from distlab.lab.checkpoint.resume import resume

        resume(lab, strategies, position, found)
        if position.first >= lab.config.steps:
            message = f"all LAB_STEPS={lab.config.steps} steps are done already: there is no step left to train"
            lab.say(message, "resume", at="normal")
    return position


@contextmanager
def saving(
    lab: Lab, strategies: dict[str, Strategy], position: TrainingPosition, loss_parts: dict[str, list[float | None]],
    checkpoints: "Checkpoints | None",
) -> Iterator[Callable[[int], None]]:  # fmt: skip
    """Wrap the steps; yield a function to call after each, which saves every LAB_CHECKPOINT_EVERY steps."""
    if checkpoints is None:
        yield lambda step: None  # noqa: ARG005
        return
    from distlab.lab.checkpoint.save import Saver

    saver = Saver(lab, checkpoints.group, strategies, position, loss_parts) if checkpoints.group is not None else None

    def passed(step: int) -> None:
        position.finish_step(step)
        if saver is not None:
            saver.after(step)

    yield passed
    if position.first > 0 and lab.rank == 0:
        detail = "samples that were not used exactly once per epoch, before and after the resume"
        lab.check(
            "resumed samples",
            position.wrongly_seen(),
            0,
            detail=detail,
            control="tests/lab/checkpoint/test_course.py::test_a_repeated_epoch_is_counted",
        )


def rotated(names: list[str], step: int) -> list[str]:
    """Rotate the variants so that each is at every position equally often, and none gains from its place."""
    first = step % len(names) if names else 0
    return names[first:] + names[:first]


def write_losses(
    lab: Lab, references: Mapping[str, list[float]], position: TrainingPosition,
    loss_parts: dict[str, list[float | None]],
) -> Curves:  # fmt: skip
    """Write the loss curves: one process, and each variant as the sum over its ranks, after those from a checkpoint;
    return the variants' on rank 0, None for unknown losses. Every other rank writes those of its logged variant."""
    everyone = lab.exchange.everyone("losses", loss_parts)
    if not lab.speaks:
        for logged in (each for each in lab.journal.records if isinstance(each, records.Told)):
            columns = itertools.zip_longest(*((of_rank or {}).get(logged.variant, []) for of_rank in everyone))
            summed = [math.fsum(value for value in column if value is not None) for column in columns]
            lab.journal.write(records.Losses(logged.variant, [*position.losses[logged.variant], *summed]))
        return {}
    for name, values in references.items():
        lab.journal.write(records.Losses(name, values))
    curves: Curves = {}
    for name in loss_parts:
        columns = itertools.zip_longest(*(of_rank[name] for of_rank in everyone))
        known = [math.fsum(value for value in column if value is not None) for column in columns]
        curves[name] = [*position.losses[name], *known]
        lab.journal.write(records.Losses(name, curves[name]))
    return curves


def write_digests(lab: Lab, strategies: dict[str, Strategy]) -> None:
    """Write a checksum of all final weights of each variant, to compare runs to the bit."""
    for name, strategy in strategies.items():
        lab.at(lab.config.steps, f"the weights of {name}")
        digest = hashlib.sha256()
        for label, weight in strategy.full("weights"):
            digest.update(label.encode())
            digest.update(raw(weight))
        if lab.rank == 0:
            lab.journal.write(records.Digest(name, digest.hexdigest()))
            lab.say(f"weights    {name}: sha256 {digest.hexdigest()}")
