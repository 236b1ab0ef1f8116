"""The cost of a rank's messages: bytes, calls and messages, which can be added."""

from collections.abc import Callable, Mapping

from distlab.techniques.collectives.costs import (
    Cost,
    all_gather_bytes,
    all_reduce_cost,
    chunk_bytes,
    norm_cost,
    reduce_scatter_bytes,
    total_cost,
)
from distlab.techniques.context_parallel.costs import ring_rows, ulysses_messages
from distlab.techniques.data_parallel.buckets import layout
from distlab.techniques.pipeline_parallel.costs import pipeline_ends
from distlab.techniques.sharded.costs import zero_bytes
from distlab.techniques.tensor_parallel.costs import scatter_calls
from distlab.techniques.tensor_parallel.layers import partition_sizes

from .placement import Local, Rank

# Messages between the ranks of a slice in a step: sums at the ends of slices, or gathers and scatters of rows.


def over_tp(rank: Rank) -> Cost:
    """Return the cost of sums at the ends of slices, or gathers and scatters of rows, with loss and gradients."""
    costs = [row_gradients_cost(rank)] if rank.rows else []
    for samples in rank.microbatches:
        costs.append(rows_cost(rank, samples) if rank.rows else sums_cost(rank, samples))
        if rank.is_last and rank.is_gpt and not rank.how.plain:
            scores = samples * rank.seq * max(rank.itemsize, 4)  # maxima; then sums, and the targets' scores
            costs += [all_reduce_cost(rank.t, scores), all_reduce_cost(rank.t, 2 * scores)]
    return total_cost(*costs)


def ends_of_slices(rank: Rank) -> int:
    """Count the sums of activations or gradients: forward and backward of each slice, half of them at gpt's ends."""
    slices = 2 if rank.is_gpt else 1
    ends = (rank.is_first + rank.is_last) * rank.is_gpt * (not rank.how.plain)
    return 2 * slices * rank.num_blocks + ends


def sums_cost(rank: Rank, samples: int) -> Cost:
    """Return the cost of all_reduces of b·s·h; a recomputed block sums its attention again, with a mask its MLP too."""
    again = rank.num_blocks * (1 + rank.drops) if rank.config.recompute and rank.is_gpt else 0
    nbytes = samples * rank.seq * rank.config.width * rank.itemsize
    return all_reduce_cost(rank.t, nbytes).times(ends_of_slices(rank) + again)


def rows_cost(rank: Rank, samples: int) -> Cost:
    """Return the cost of a gather and a scatter of rows instead of each sum; a recomputed block gathers for both slices
    and scatters once, with a mask after its MLP twice, and the head gathers."""
    row_bytes = samples * rank.config.width * rank.itemsize
    both = ends_of_slices(rank)
    again = rank.num_blocks if rank.config.recompute else 0
    head = int(rank.is_last and rank.config.recompute)
    return total_cost(
        gathered(rank, row_bytes).times(both + 2 * again + head),
        scattered(rank, row_bytes).times(both + again * (1 + rank.drops)),
    )


def gathered(rank: Rank, row_bytes: int) -> Cost:
    """Return the cost of an all_gather of the text's rows: equal chunks in one call; others one call per rank."""
    t, own = rank.t, rank.at["tp"]
    nbytes = all_gather_bytes("direct", t, rank.seq * row_bytes, own, row_bytes)
    if rank.seq % t == 0:
        return Cost(nbytes, 1, 2 * (t - 1))
    return Cost(nbytes, t - 1 if rank.own_rows() else 0, t - 1)


def scattered(rank: Rank, row_bytes: int) -> Cost:
    """Return the cost of a reduce_scatter of rows: each other rank gets its own."""
    t, own = rank.t, rank.at["tp"]
    nbytes = reduce_scatter_bytes("direct", t, rank.seq * row_bytes, own, row_bytes)
    return Cost(nbytes, scatter_calls(chunk_bytes(t, rank.seq, 1), own, rank.config.backend), t - 1)


def row_gradients_cost(rank: Rank) -> Cost:
    """Return the cost of summing gradients of replicated parameters used on rows: per stage, or per unit of ZeRO."""
    sizes = [sum(local.numel for local in unit if local.whole) * rank.itemsize for unit in rank.units]
    times = len(rank.microbatches) if rank.how.zero > 1 else 1
    sums = [nbytes for nbytes in sizes if nbytes] if rank.how.zero else [sum(sizes)]
    return total_cost(*(all_reduce_cost(rank.t, nbytes).times(times) for nbytes in sums))


# Messages of each variant along each axis in a step: the formulas of one axis, for the rank's part of model and batch.

FORMULAS = {
    "dp": "2(d-1)/d x P/(t·p), in ZeRO of chunks",
    "cp": "3(c-1)/c x K and V per layer, in ulysses 4(c-1)/c²; and gradients as over dp",
    "dp_cp": "2(dc-1)/dc x P/(t·p), in ZeRO of chunks",
    "tp": "2(t-1)/t x b·s·h per sum of its layers, and the loss",
    "pp": "b·s·h per end of a stage, with rows b·s·h/t, and shared weights",
}


# --- over the replicas ---


def over_replicas(rank: Rank) -> Cost:
    """Return the cost of the buckets of its stage, or of ZeRO's messages per unit."""
    return total_cost(*(shards_cost(rank, unit) for unit in rank.units)) if rank.how.zero else buckets_cost(rank)


def buckets_cost(rank: Rank) -> Cost:
    """Return the cost of an all_reduce per bucket; a weight that two stages share is first in both. Replicated
    parameters have separate buckets if slices differ in size."""
    ordered = sorted((local for unit in rank.units for local in unit), key=lambda local: not local.shared)
    if rank.how.plain:
        return total_cost(*(all_reduce_cost(rank.replicas, local.numel * rank.itemsize) for local in ordered))
    parts = (
        [[local for local in ordered if local.whole is whole] for whole in (True, False)] if rank.uneven else [ordered]
    )
    costs = []
    for part in parts:
        sizes = [local.numel * rank.itemsize for local in part]
        buckets = layout(sizes, rank.config.bucket_mib * 2**20)
        costs += [all_reduce_cost(rank.replicas, sum(sizes[index] for index in bucket)) for bucket in buckets]
    return total_cost(*costs)


def shards_cost(rank: Rank, unit: list[Local]) -> Cost:
    """Return the cost of sums and gathers of chunks; a unit that two layers use stays gathered between them."""
    zero, microbatches, replicas = zero_stage(rank, unit), len(rank.microbatches), rank.replicas
    gathers = 1 if spans(rank, unit) else 2
    chunk = -(-sum(local.numel for local in unit) // replicas)
    nbytes = zero_bytes(zero, replicas, replicas * chunk * rank.itemsize, microbatches, gathers)
    moves = {1: 2, 2: microbatches + 1, 3: microbatches * (gathers + 1)}[zero] * (replicas - 1)
    return Cost(nbytes, moves, moves)


def zero_stage(rank: Rank, unit: list[Local]) -> int:
    """Return ZeRO's stage of a unit: a unit that another pipeline stage uses too stays whole."""
    return min(rank.how.zero, 2) if unit[0].shared else rank.how.zero


def spans(rank: Rank, unit: list[Local]) -> bool:
    """Return whether it has both ends of gpt."""
    return rank.config.tie and rank.p == 1 and unit[0].name == "token.weight"


# --- over the positions ---


def over_cp(rank: Rank) -> Cost:
    """Return the cost of passing keys, values and their gradients around, or of exchanging heads for positions; a
    recomputed block repeats its forward messages."""
    head_bytes = rank.config.width // rank.config.heads * rank.itemsize
    own = partition_sizes(rank.config.heads, rank.t)[rank.at["tp"]]
    heads, again, place = partition_sizes(own, rank.c), rank.config.recompute, rank.at["cp"]
    if rank.how.swaps:
        sent, row_bytes = ulysses_messages(rank.positions, heads, place, again=again), head_bytes
    else:
        sent, row_bytes = ring_rows(rank.positions, place, again=again), 2 * own * head_bytes
    costs = [
        Cost(samples * sum(sent) * row_bytes, sum(number > 0 for number in sent) * (samples > 0), len(sent))
        for samples in rank.microbatches
    ]
    return total_cost(*costs).times(rank.num_blocks)


# --- over the stages ---


def over_pp(rank: Rank) -> Cost:
    """Return the cost at the ends of its stage, and of the gradient that the first and last stage share."""
    ends, row_bytes = pipeline_ends(rank.p, 1, rank.at["pp"]), rank.config.width * rank.itemsize
    passed = [samples * rank.own_rows() * row_bytes for samples in rank.microbatches]
    costs = [Cost(ends * nbytes, ends, ends) for nbytes in passed if nbytes]
    for unit in [unit for unit in rank.units if unit[0].shared]:
        numel = owned(rank, unit) if rank.how.zero else unit[0].numel
        costs += [Cost(numel * rank.itemsize, 1, 1)] if numel else []
    return total_cost(*costs)


def owned(rank: Rank, unit: list[Local]) -> int:
    """Return how many numbers of a unit this rank steps."""
    numel = sum(local.numel for local in unit)
    chunk = -(-numel // rank.replicas)
    return max(0, min(chunk, numel - rank.replica * chunk))


OVER: Mapping[str, Callable[[Rank], Cost]] = {"cp": over_cp, "tp": over_tp, "pp": over_pp}


def by_axis(rank: Rank) -> dict[str, Cost]:
    """Return the cost in each group: along each axis of more than one rank, and over dp and cp together."""
    axes = {axis: ranks for axis, ranks in rank.sizes.items() if ranks > 1}
    costs = {axis: [OVER[axis](rank)] if axis in OVER else [] for axis in axes}
    for axis, ranks in axes.items():
        costs[axis].append(norm_cost(ranks, rank.config.clip))
    if rank.replicas > 1:
        costs.setdefault(rank.replicated, []).append(over_replicas(rank))
    return {axis: total_cost(*parts) for axis, parts in costs.items()}
