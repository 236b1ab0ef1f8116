"""Checks of a pipeline's memory, which depends on the order of its passes.

What a pass saves must be freed as soon as the part of its backward that needs it is over.
"""

from collections.abc import Sequence

import torch

from distlab.contract import Claims, Measured, Mode
from distlab.lab.config import Config
from distlab.lab.lab import Lab
from distlab.lab.verify.counted import Saved, saved
from distlab.lab.verify.pipeline_checks import Pass, Piped, check_schedule
from distlab.lab.verify.run_all import measured
from distlab.lab.workload.model import outline
from distlab.lab.workload.user_model import is_own
from distlab.techniques.pipeline_parallel.schedules import stages_of
from distlab.techniques.pipeline_parallel.strategy import joined, runs_of


def check_leftover(lab: Lab, name: str, measured: Measured, owners: list[int]) -> None:
    """Check that a step leaves nothing but a number per end of a stage, which has the dtype of its messages."""
    if not is_own(lab.config.model):
        numbers = 2 * owners.count(lab.rank) * lab.config.itemsize
        leftover = measured.rest["activations"]
        detail = f"{leftover} B other than weights, gradients, moments and messages remain, {numbers} allowed"
        lab.check("left of a step", max(0, leftover - numbers), 0, name, detail)


def check_order(lab: Lab, name: str, measured: Measured, schedule: str, owners: list[int]) -> None:
    """Check that passes follow the schedule, and that what they save is freed after their backward."""
    number = 1 if name == "one_microbatch" else lab.config.num_microbatches
    done = check_schedule(lab, name, measured.order, Piped(schedule, number, owners))
    if done:
        check_leftover(lab, name, measured, owners)
        predicted = most_saved(done, saved_by_pass(lab, owners, number, as_one=name == "one_microbatch"))
        formula = "what one process saves for the microbatches in flight"
        lab.compare(
            "activation bytes", predicted, measured.activation_bytes, tolerance=0.01 * predicted, variant=name,
            formula=formula,
        )  # fmt: skip


def most_saved(done: list[Pass], saved_by: dict[tuple[int, int], Saved]) -> int:
    """Return the most bytes stored for backward passes, if passes save {(chunk, microbatch): kept}; after the input's
    gradient only the inputs of linear layers are left."""
    saved_now = most = 0
    for kind, chunk, microbatch in done:
        whole, linear = saved_by[chunk, microbatch]
        saved_now += {"forward": whole, "backward": -whole, "input": linear - whole, "weight": -linear}[kind]
        most = max(most, saved_now)
    return most


def saved_by_pass(lab: Lab, owners: list[int], number: int, *, as_one: bool) -> dict[tuple[int, int], Saved]:
    """Return what one process saves of each of `number` microbatches in each chunk of this rank; with `as_one` a batch
    in one piece is a copy, not a view of the samples."""
    config = lab.config.model_copy(update={"microbatches": number})
    batches = lab.mode.batches(config, proof=False, device=lab.device, dtype=getattr(torch, config.dtype))
    microbatches = [joined(lab.microbatches(batches, 0))] if as_one else lab.microbatches(batches, 0)
    runs = runs_of(config.model, len(outline(config).layers), len(owners))
    sizes = {len(microbatch.inputs): microbatch for microbatch in microbatches}
    kept = {
        (chunk, size): saved(lab, runs[stage], microbatch)
        for chunk, stage in enumerate(stages_of(lab.rank, owners))
        for size, microbatch in sizes.items()
    }
    return {
        (chunk, index): kept[chunk, len(microbatch.inputs)]
        for chunk in range(owners.count(lab.rank))
        for index, microbatch in enumerate(microbatches)
    }


def claims(mode: Mode, config: Config) -> Sequence[Claims]:
    """Return the checks of all variants by hand: bytes, calls, and the order of passes with its memory and bubble."""
    return (
        *measured(mode, config),
        Claims(("in flight",), mode.by_hand, when=config.proof),
        Claims(("called bytes", "wire bytes", "rest bytes", "calls"), mode.by_hand),
        Claims(("schedule", "bubble on paper", "activation bytes"), mode.by_hand),
        Claims(("left of a step",), (), fails_in="test_tensors_left_by_a_step_fail_the_run"),
    )
