"""What a pipeline's run is held against, beyond the proof: its order, the time and the memory that come of it.

The order keeps the rules of its schedule (order.py). The orders of all ranks, put on paper with passes of one length,
idle for what the formula says: an order that keeps all rules and waits where it need not is found so. And what a pass
saves is gone as soon as the part of its backward that needs it is over.
"""

from typing import Any

import torch

from experiments.pp.order import Pass, broken, passes
from workers.contract import Measured
from workers.lab import Lab
from workers.measure.formulas.pipelines import idle_share
from workers.parallel.schedules import Action, Kind, stages_of
from workers.parallel.simulation import simulate
from workers.passes.outline import Saved, saved
from workers.strategies.engines import joined
from workers.strategies.pipelined import runs_of
from workers.workload.model import outline

THIRDS: dict[Kind, float] = {
    "forward": 1,
    "input": 1,
    "weight": 1,
    "backward": 2,
}  # of a microbatch's work on one stage


def most_held(done: list[Pass], kept: dict[tuple[int, int], Saved]) -> int:
    """The most bytes held for what is left of the backward passes, of passes that save so much: {(chunk, microbatch):
    kept}; behind the input's gradient there are left the inputs of linear layers."""
    held = most = 0
    for kind, chunk, microbatch in done:
        whole, linear = kept[chunk, microbatch]
        held += {"forward": whole, "backward": -whole, "input": linear - whole, "weight": -linear}[kind]
        most = max(most, held)
    return most


def check_order(lab: Lab, name: str, measured: Measured, owners: list[int]) -> None:
    """The passes come in the order of the schedule, idle no more than its formula, and what they save is gone after
    their backward."""
    number = 1 if name == "naive" else lab.config.num_microbatches
    mine = stages_of(lab.rank, owners)
    done = passes(measured.order)
    faults = broken(name, done, lab.rank, lab.world_size, number, len(mine))
    lab.check("schedule", len(faults), 0, name, "; ".join(faults) or f"{len(done)} passes in the order of {name}")
    everyone = lab.exchange.everyone(f"order of {name}", [] if faults else done)
    if all(everyone):
        check_on_paper(lab, name, everyone, owners, number)
    if not faults:
        predicted = most_held(done, saved_by_pass(lab, owners, number, as_one=name == "naive"))
        formula = "what the microbatches in flight save in one process"
        lab.compare(
            "activation bytes", predicted, measured.activation_bytes, tolerance=0.01 * predicted, variant=name,
            formula=formula,
        )  # fmt: skip


def check_on_paper(lab: Lab, name: str, everyone: list[list[Any]], owners: list[int], number: int) -> None:
    """What ran on all ranks, with passes of one length and messages of none, idles as long as the formula says."""
    ran = [
        [Action(kind, stages_of(rank, owners)[chunk], mb) for kind, chunk, mb in done]
        for rank, done in enumerate(everyone)
    ]
    spans = simulate(ran, THIRDS)
    length = max(own[-1].end_s for own in spans)
    idle = 1 - sum(span.end_s - span.start_s for own in spans for span in own) / (length * len(spans))
    share = idle_share(name, lab.world_size, number, len(owners) // lab.world_size)
    lab.check("bubble on paper", abs(idle - share), 1e-9, name, f"{idle:.3f} idle as it ran, {share:.3f} by formula")


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
