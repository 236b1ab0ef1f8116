"""The most that a rank of a mesh holds in a step, predicted: what it keeps between the steps, what ZeRO has whole on
top of that, and the passes of this rank alone.

    working   activations of the microbatches in flight, what operations leave for the next, and a gradient beside
              the one that it is added to (alone.py)
    kept      weights, gradients and optimizer state at rest (rest.py)
    zero1     what others send for the sum of a unit, once all microbatches are through
    zero2     a unit's gradients whole, while they are collected and summed, and what others send for that sum
    zero3     and the weights of two layers, the one that computes and the next
    update    in place of the passes AdamW's scratch, where that is more

A peak is held from below and from above: within TOLERANCE of their sum.
"""

from collections.abc import Mapping

from experiments.mesh.alone import moments
from experiments.mesh.held import HOW, Rank
from experiments.mesh.rest import at_rest
from experiments.mesh.sent import owned
from workers.contract import Measured
from workers.lab import Lab
from workers.measure.formulas.peaks import adamw_scratch_bytes, shown_on
from workers.parallel.schedules import Action
from workers.passes.forgotten import Moment

TOLERANCE = 0.10
TERMS = {0: "", 1: "", 2: " + a unit's gradients twice", 3: " + a unit's gradients twice + two units of weights"}


def chunks_of(rank: Rank) -> dict[int, int]:
    """By layer, how many numbers of its unit a rank owns, with padding; both ends of gpt are one unit where they share
    a weight."""
    found = dict[int, int]()
    for stage, layers in rank.stages.items():
        units = [unit for unit in rank.units(stage) if not unit[0].shared]
        numels = [sum(local.numel for local in unit) for unit in units]
        for place, layer in enumerate(layers):
            found[layer] = -(-numels[place if place < len(units) else 0] // rank.replicas)
    return found


def passes_bytes(rank: Rank, passed: list[Moment]) -> float:
    """The highest moment of the passes, with what ZeRO has whole then: from stage 2 on the gradients that are
    collected, or those that are summed until another unit's begin to come, and shards of those that were; in stage 3
    the weights of two layers. Of stage 1, which has room for all, what comes for the last sums."""
    chunks, most, before, shards = chunks_of(rank), 0.0, -1, set[int]()
    for moment in passed:
        numel, own = 0, chunks[moment.layer]
        summed = 0 if before in (-1, moment.layer) else chunks[before]
        if rank.how.zero == 1:
            numel += (rank.replicas - 1) * summed * moment.last
        if rank.how.zero > 1:
            shards |= {before} if summed else set()
            numel += sum(chunks[layer] for layer in shards) + ((2 * rank.replicas - 1) * summed or rank.replicas * own)
        if rank.how.zero > 2:
            numel += rank.replicas * (own + chunks.get(moment.layer - 1, 0))
        added = moment.added if rank.how.zero < 2 else 0
        most, before = max(most, moment.highest + numel * rank.itemsize, added), moment.layer
    return most


def update_bytes(rank: Rank) -> float:
    """What the update holds on top of what is kept: gradients for masters, and AdamW's scratch."""
    units = [unit for stage in rank.stages for unit in rank.units(stage)]
    zero, masters = rank.how.zero, rank.config.dtype == "bfloat16"
    stepped = [owned(rank, unit) for unit in units] if zero else [local.numel for unit in units for local in unit]
    adam = rank.config.optimizer == "adamw"
    return 4.0 * masters * sum(stepped) + adam * adamw_scratch_bytes(stepped, 4 if masters else rank.itemsize)


def peak_bytes(rank: Rank, passed: list[Moment]) -> float:
    """The highest of the passes, or of the update; ZeRO-2 begins a step without the gradients of the one before."""
    forgotten = sum(chunks_of(rank).values()) * rank.itemsize if rank.how.zero > 1 else 0
    return at_rest(rank) + max(passes_bytes(rank, passed) - forgotten, update_bytes(rank))


def compare_peaks(
    lab: Lab, ranks: Mapping[str, Rank], actions: Mapping[str, list[Action]], measured: Mapping[str, Measured]
) -> None:
    """Hold the most that each variant of ours held against that."""
    known: dict[
        tuple[object, ...], list[Moment]
    ] = {}  # variants that differ in what they keep alone make the same passes
    for name, rank in ranks.items():
        passes = (rank.rows, rank.how.swaps, rank.chunks, *actions[name])
        if passes not in known:
            lab.at(0, f"the passes of {name} alone")
            known[passes] = moments(lab, rank, actions[name])
        predicted = peak_bytes(rank, known[passes])
        lab.compare(
            "peak bytes", predicted, sum(measured[name].peak.values()), "B", TOLERANCE * predicted, name,
            f"kept + passes of the rank alone{TERMS[HOW[name].zero]}", shown=shown_on(lab.config.device),
            control="tests/experiments/test_mesh.py::test_gradients_that_stay_whole_show_in_the_peak",
        )  # fmt: skip
