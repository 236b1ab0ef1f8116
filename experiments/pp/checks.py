"""What a pipeline's run is held against, beyond the proof and its schedule: the memory that comes of the order.

What a pass saves is gone as soon as the part of its backward that needs it is over.
"""

import torch

from workers.contract import Measured
from workers.lab import Lab
from workers.parallel.schedules import stages_of
from workers.passes.outline import Saved, saved
from workers.passes.pipeline_order import Pass
from workers.passes.pipeline_schedule import Piped, check_schedule
from workers.strategies.engines import joined
from workers.strategies.pipelined import runs_of
from workers.workload.model import outline


def check_order(lab: Lab, name: str, measured: Measured, owners: list[int]) -> None:
    """The passes come in the order of the schedule, and what they save is gone after their backward."""
    number = 1 if name == "naive" else lab.config.num_microbatches
    done = check_schedule(lab, name, measured.order, Piped(name, number, owners))
    if done:
        predicted = most_held(done, saved_by_pass(lab, owners, number, as_one=name == "naive"))
        formula = "what the microbatches in flight save in one process"
        lab.compare(
            "activation bytes", predicted, measured.activation_bytes, tolerance=0.01 * predicted, variant=name,
            formula=formula,
        )  # fmt: skip


def most_held(done: list[Pass], kept: dict[tuple[int, int], Saved]) -> int:
    """The most bytes held for what is left of the backward passes, of passes that save so much: {(chunk, microbatch):
    kept}; behind the input's gradient there are left the inputs of linear layers."""
    held = most = 0
    for kind, chunk, microbatch in done:
        whole, linear = kept[chunk, microbatch]
        held += {"forward": whole, "backward": -whole, "input": linear - whole, "weight": -linear}[kind]
        most = max(most, held)
    return most


def saved_by_pass(lab: Lab, owners: list[int], number: int, *, as_one: bool) -> dict[tuple[int, int], Saved]:
    """What one process saves of each microbatch of `number` in each chunk of this rank; `as_one` where a batch in one
    piece is a copy, and no view of the samples."""
    config = lab.config.model_copy(update={"microbatches": number})
    batches = lab.mode.batches(config, proof=False, device=lab.device, dtype=getattr(torch, config.dtype))
    microbatches = [joined(lab.dealt(batches, 0))] if as_one else lab.dealt(batches, 0)
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
