"""What each variant sends along each axis in a step: the formulas of one axis, with what the others leave of the model
and of the batch."""

from collections.abc import Callable, Mapping

from experiments.mesh.costs import Cost, summed, total
from experiments.mesh.held import Local, Rank
from experiments.mesh.sent_by_slices import over_tp
from workers.measure.formulas.context import ring_rows, ulysses_messages
from workers.measure.formulas.pipelines import pipeline_ends
from workers.measure.formulas.sharding import zero_bytes
from workers.parallel.buckets import layout
from workers.parallel.slices import shares

NORM_BYTES = 8  # clipping sums one number along each axis
FORMULAS = {
    "dp": "2(d-1)/d x P/(t·p), in ZeRO of chunks",
    "cp": "3(c-1)/c x K and V a layer, in ulysses 4(c-1)/c²; and gradients as over dp",
    "dp_cp": "2(dc-1)/dc x P/(t·p), in ZeRO of chunks",
    "tp": "2(t-1)/t x b·s·h a sum of its layers, and the loss",
    "pp": "b·s·h an end, with rows b·s·h/t, and what two stages share",
}


# --- over the replicas ---


def over_replicas(rank: Rank) -> Cost:
    """Buckets of each stage, or what ZeRO moves of each unit."""
    costs = []
    for stage in rank.stages:
        units = rank.units(stage)
        costs += [in_buckets(rank, units)] if not rank.how.zero else [in_shards(rank, unit) for unit in units]
    return total(costs)


def in_buckets(rank: Rank, units: list[list[Local]]) -> Cost:
    """An all_reduce of each; a weight that two stages share is the first in the order of both."""
    ordered = sorted((local for unit in units for local in unit), key=lambda local: not local.shared)
    sizes = [local.numel * rank.itemsize for local in ordered]
    limit = 1.0 if rank.how.one_by_one else rank.config.bucket_mib * 2**20
    buckets = layout(sizes, limit)
    return total([summed(rank.replicas, sum(sizes[index] for index in bucket)) for bucket in buckets])


def in_shards(rank: Rank, unit: list[Local]) -> Cost:
    """Sums and gathers of chunks; a unit that two layers compute with stays gathered from the one to the other."""
    zero, microbatches, replicas = stage_of(rank, unit), len(rank.microbatches), rank.replicas
    gathers = 1 if spans(rank, unit) else 2
    chunk = -(-sum(local.numel for local in unit) // replicas)
    nbytes = zero_bytes(zero, replicas, replicas * chunk * rank.itemsize, microbatches, gathers)
    moves = {1: 2, 2: microbatches + 1, 3: microbatches * (gathers + 1)}[zero] * (replicas - 1)
    return Cost(nbytes, moves, moves)


def stage_of(rank: Rank, unit: list[Local]) -> int:
    """ZeRO's stage of a unit: what another stage of the pipeline computes with too stays whole."""
    return min(rank.how.zero, 2) if unit[0].shared else rank.how.zero


def spans(rank: Rank, unit: list[Local]) -> bool:
    """Whether both ends of gpt lie in it."""
    return rank.config.tie and rank.p == 1 and unit[0].name == "token.weight"


# --- over the positions ---


def over_cp(rank: Rank) -> Cost:
    """Keys and values on their way round and their gradients behind them, or heads for positions and back; a block
    that is computed again sends what it sent forward once more."""
    head_bytes = rank.config.width // rank.config.heads * rank.itemsize
    own = shares(rank.config.heads, rank.t)[rank.at["tp"]]
    heads, again, place = shares(own, rank.c), rank.config.recompute, rank.at["cp"]
    if rank.how.swaps:
        sent, row_bytes = ulysses_messages(rank.positions, heads, place, again=again), head_bytes
    else:
        sent, row_bytes = ring_rows(rank.positions, place, again=again), 2 * own * head_bytes
    costs = [
        Cost(samples * sum(sent) * row_bytes, sum(number > 0 for number in sent) * (samples > 0), len(sent))
        for samples in rank.microbatches
    ]
    return total(costs).times(rank.num_blocks)


# --- over the stages ---


def over_pp(rank: Rank) -> Cost:
    """What passes at the ends of its stages, and the gradient of a weight that the first and the last one share."""
    ends, row_bytes = pipeline_ends(rank.p, rank.chunks, rank.at["pp"]), rank.config.width * rank.itemsize
    passed = [samples * rank.own_rows() * row_bytes for samples in rank.microbatches]
    costs = [Cost(ends * nbytes, ends, ends) for nbytes in passed if nbytes]
    shared = [unit for stage in rank.stages for unit in rank.units(stage) if unit[0].shared]
    for unit in shared:
        numel = owned(rank, unit) if rank.how.zero else unit[0].numel
        costs += [Cost(numel * rank.itemsize, 1, 1)] if numel else []
    return total(costs)


def owned(rank: Rank, unit: list[Local]) -> int:
    """Numbers of a unit that this rank steps."""
    numel = sum(local.numel for local in unit)
    chunk = -(-numel // rank.replicas)
    return max(0, min(chunk, numel - rank.replica * chunk))


OVER: Mapping[str, Callable[[Rank], Cost]] = {"cp": over_cp, "tp": over_tp, "pp": over_pp}


def by_axis(rank: Rank) -> dict[str, Cost]:
    """What a rank sends in each of its groups: along each axis that is longer than one rank, and over dp and cp
    together where both are."""
    long = {axis: ranks for axis, ranks in rank.sizes.items() if ranks > 1}
    costs = {axis: [OVER[axis](rank)] if axis in OVER else [] for axis in long}
    for axis, ranks in long.items():
        costs[axis] += [] if rank.config.clip is None else [summed(ranks, NORM_BYTES)]
    if rank.replicas > 1:
        costs.setdefault(rank.replicated, []).append(over_replicas(rank))
    return {axis: total(parts) for axis, parts in costs.items()}
