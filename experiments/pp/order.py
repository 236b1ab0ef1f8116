"""The schedule that ran, held against the rules of the papers: predicates on the recorded order of passes.

Nothing here comes from workers/parallel/schedules.py, which makes the schedules: a wrong line there would be allowed
here too. A pass is known by the layers that it runs through and, on its way back, by those whose gradients autograd
hands over; its microbatch is the mark of whoever runs it.

  gpipe         all forwards, then all backwards (Huang et al. 2019, section 2.3)
  1f1b          p-1-r forwards ahead, then one forward and one backward in turn, then the backwards that are left
                (Narayanan et al. 2021, section 2.2.1): min(m, p-r) microbatches are held
  interleaved   chunk by chunk for a group of microbatches, 2(p-1-r) + (v-1)·g passes ahead, g being the first group's
                size (section 2.2.2; Megatron's own, whose groups are of p). Groups share m as evenly as it goes
"""

from itertools import pairwise
from typing import NamedTuple

import torch

from workers.contract import Measured
from workers.lab import Lab
from workers.measure.formulas.pipelines import in_flight
from workers.measure.order import Order
from workers.passes.outline import saved_bytes
from workers.strategies.pipelined import runs_of
from workers.workload.data import shard_sizes
from workers.workload.model import outline


class Pass(NamedTuple):
    """One microbatch through one of this rank's chunks, one way or the other."""

    kind: str
    chunk: int  # counted from the model's first layers
    microbatch: int


def passes(order: Order) -> list[Pass]:
    """The passes of a step in their order."""
    runs: list[tuple[int, str, frozenset[str], int]] = []
    for kind in ("forward", "backward"):
        for place, (label, events) in zip(order.where("begin", kind), order.within(kind), strict=True):
            ran = {event.label for event in events if (event.what, event.name) == ("begin", "layer")}
            learnt = {event.label.split(".")[0] for event in events if event.what == "gradient"}
            runs.append((place, kind, frozenset(ran if kind == "forward" else learnt), int(label)))
    chunks = sorted(
        {layers for _, kind, layers, _ in runs if kind == "forward"}, key=lambda layers: min(map(int, layers))
    )
    known = {layers: number for number, layers in enumerate(chunks)}
    return [Pass(kind, known.get(layers, -1), microbatch) for _, kind, layers, microbatch in sorted(runs)]


def broken(name: str, done: list[Pass], rank: int, ranks: int, microbatches: int, chunks: int) -> list[str]:
    """Sentences for the rules of schedule `name` that the passes of `rank` break; `chunks` a rank."""
    forwards = [each for each in done if each.kind == "forward"]
    backwards = [each for each in done if each.kind == "backward"]
    every = {(chunk, number) for chunk in range(chunks) for number in range(microbatches)}
    if any(sorted((c, m) for _, c, m in some) != sorted(every) for some in (forwards, backwards)):
        return ["a microbatch does not go once forward and once backward through each chunk"]
    faults = []
    if any(done.index(Pass("forward", *each[1:])) > done.index(each) for each in backwards):
        faults.append("a backward comes before its forward")
    group = group_of(microbatches, ranks) if name == "interleaved" else [0] * microbatches
    ahead = [(group[m], chunk, m) for _, chunk, m in forwards]
    back = [(group[m], -chunk, m) for _, chunk, m in backwards]
    for kind, keys in (("forwards", ahead), ("backwards", back)):
        if keys != sorted(keys):
            faults.append(f"{kind} are not in the order of groups, chunks and microbatches")
    allowed = in_flight(name, ranks, microbatches, rank, chunks)
    first = [each.kind for each in done].index("backward")
    if first != allowed:
        faults.append(f"{first} forwards come before the first backward, where the rule says {allowed}")
    turns = [each.kind for each in done[first:]]
    turns = turns[: len(turns) - turns[::-1].index("forward")] if "forward" in turns else []
    if any(one == other for one, other in pairwise(turns)):
        faults.append("forwards and backwards do not take turns after the first backward")
    return faults


def group_of(microbatches: int, ranks: int) -> list[int]:
    """The group of each microbatch: at least p in each where there are as many, the larger groups first."""
    sizes = shard_sizes(microbatches, max(1, microbatches // ranks))
    return [group for group, size in enumerate(sizes) for _ in range(size)]


def most_held(done: list[Pass], nbytes: dict[tuple[int, int], int]) -> int:
    """The most bytes between a forward and its backward, of passes that save so many: {(chunk, microbatch): bytes}."""
    held = most = 0
    for kind, chunk, microbatch in done:
        held += nbytes[chunk, microbatch] * (1 if kind == "forward" else -1)
        most = max(most, held)
    return most


def check_order(lab: Lab, name: str, measured: Measured, chunks: int) -> None:
    """The passes come in the order of the schedule, and what they save is gone after their backward."""
    number = 1 if name == "naive" else lab.config.num_microbatches
    done = passes(measured.order)
    faults = broken(name, done, lab.rank, lab.world_size, number, chunks)
    lab.check("schedule", len(faults), 0, name, "; ".join(faults) or f"{len(done)} passes in the order of {name}")
    if not faults:
        predicted = most_held(done, saved_by_pass(lab, chunks, number))
        formula = "what the microbatches in flight save in one process"
        lab.compare(
            "activation bytes", predicted, measured.activation_bytes, tolerance=0.01 * predicted, variant=name,
            formula=formula,
        )  # fmt: skip


def saved_by_pass(lab: Lab, chunks: int, number: int) -> dict[tuple[int, int], int]:
    """Bytes that one process saves of each microbatch of `number` in each chunk of this rank."""
    config = lab.config.model_copy(update={"microbatches": number})
    batches = lab.mode.batches(config, proof=False, device=lab.device, dtype=getattr(torch, config.dtype))
    microbatches = lab.dealt(batches, 0)
    runs = runs_of(config.model, len(outline(config).layers), chunks * lab.world_size)[lab.rank :: lab.world_size]
    sizes = {len(microbatch.inputs): microbatch for microbatch in microbatches}
    saved = {
        (chunk, size): saved_bytes(lab, run, microbatch)
        for chunk, run in enumerate(runs)
        for size, microbatch in sizes.items()
    }
    return {
        (chunk, index): saved[chunk, len(microbatch.inputs)]
        for chunk in range(chunks)
        for index, microbatch in enumerate(microbatches)
    }
