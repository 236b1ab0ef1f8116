"""What the ranks of a slice send each other in a step: sums at the ends of their slices, or gathers and scatters of
rows."""

from experiments.mesh.costs import Cost, summed, total
from experiments.mesh.held import Rank
from workers.measure.formulas.collectives import all_gather_bytes, chunk_bytes, reduce_scatter_bytes
from workers.measure.formulas.tensor import scatter_calls


def over_tp(rank: Rank) -> Cost:
    """Sums at the ends of slices, or gathers and scatters of rows; the loss; and what rows leave to be summed."""
    costs = [rows_at_rest(rank)] if rank.rows else []
    for samples in rank.microbatches:
        costs.append(in_rows(rank, samples) if rank.rows else in_sums(rank, samples))
        if rank.is_last and rank.is_gpt:
            scores = samples * rank.seq * max(rank.itemsize, 4)  # maxima; then sums, and the targets' scores
            costs += [summed(rank.t, scores), summed(rank.t, 2 * scores)]
    return total(costs)


def ends_of_slices(rank: Rank) -> int:
    """Where activations or their gradients are summed: forward and backward of each slice, and a half at gpt's ends."""
    slices = 2 if rank.is_gpt else 1
    return 2 * slices * rank.num_blocks + (rank.is_first + rank.is_last) * rank.is_gpt


def in_sums(rank: Rank, samples: int) -> Cost:
    """All_reduces of b·s·h; a block that is computed again sums its attention again, and needs no more unless the
    mask of what its MLP gives is kept."""
    again = rank.num_blocks * (1 + rank.drops) if rank.config.recompute and rank.is_gpt else 0
    nbytes = samples * rank.seq * rank.config.width * rank.itemsize
    return summed(rank.t, nbytes).times(ends_of_slices(rank) + again)


def in_rows(rank: Rank, samples: int) -> Cost:
    """A gather and a scatter of rows in place of each; computed again, a block gathers for both slices and scatters
    once, with a mask behind its MLP twice, and the head gathers."""
    row_bytes = samples * rank.config.width * rank.itemsize
    both = ends_of_slices(rank)
    again = rank.num_blocks if rank.config.recompute else 0
    head = int(rank.is_last and rank.config.recompute)
    return total(
        [
            gathered(rank, row_bytes).times(both + 2 * again + head),
            scattered(rank, row_bytes).times(both + again * (1 + rank.drops)),
        ]
    )


def gathered(rank: Rank, row_bytes: int) -> Cost:
    """An all_gather of the text's rows: equal chunks by the backend, in one call; others one to each rank."""
    t, own = rank.t, rank.at["tp"]
    nbytes = all_gather_bytes("direct", t, rank.seq * row_bytes, own, row_bytes)
    if rank.seq % t == 0:
        return Cost(nbytes, 1, 2 * (t - 1))
    return Cost(nbytes, t - 1 if rank.own_rows() else 0, t - 1)


def scattered(rank: Rank, row_bytes: int) -> Cost:
    """A reduce_scatter of rows: to each other rank its own."""
    t, own = rank.t, rank.at["tp"]
    nbytes = reduce_scatter_bytes("direct", t, rank.seq * row_bytes, own, row_bytes)
    return Cost(nbytes, scatter_calls(chunk_bytes(t, rank.seq, 1), own, rank.config.backend), t - 1)


def rows_at_rest(rank: Rank) -> Cost:
    """Gradients of what every rank holds whole and used on its rows: of a stage in one sum, or of a unit of ZeRO."""
    costs = []
    for stage in rank.stages:
        wholes = [sum(local.numel for local in unit if local.whole) * rank.itemsize for unit in rank.units(stage)]
        times = len(rank.microbatches) if rank.how.zero > 1 else 1
        sums = [nbytes for nbytes in wholes if nbytes] if rank.how.zero else [sum(wholes)]
        costs += [summed(rank.t, nbytes).times(times) for nbytes in sums]
    return total(costs)
