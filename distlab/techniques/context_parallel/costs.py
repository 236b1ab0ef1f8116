"""Context parallelism: N ranks, of which rank r holds `num_rows[r]` of S positions (Liu et al. 2023, Jacobs et al.
2023).

A row belongs to one position: 2·b·h numbers of K and V together, b·h/a numbers of one head. Uneven parts are counted
exactly. With equal parts a rank sends in a layer, forward and backward, of the bytes of all K and V:

    gathered   2(N-1)/N        ring, zigzag   3(N-1)/N        Ulysses   4(N-1)/N²
    shift      9(N-1)/4N on average, with zig-zag parts
"""

from collections.abc import Sequence

from distlab.techniques.collectives.costs import all_gather_bytes, reduce_scatter_bytes
from distlab.techniques.tensor_parallel.costs import scatter_calls


def gathered_bytes(num_rows: Sequence[int], row_bytes: int, rank: int) -> float:
    """Return what a rank sends for an all_gather of K and V forward, and a reduce_scatter backward."""
    nbytes, ranks = sum(num_rows) * row_bytes, len(num_rows)
    gather = "gloo" if len(set(num_rows)) == 1 else "direct"
    return all_gather_bytes(gather, ranks, nbytes, rank, row_bytes) + reduce_scatter_bytes(
        "direct", ranks, nbytes, rank, row_bytes
    )


def gathered_calls(num_rows: Sequence[int], rank: int, backend: str) -> int:
    """Count a call for an all_gather of equal parts, else a send to each other rank; and the reduce_scatter's calls."""
    even, others = len(set(num_rows)) == 1, len(num_rows) - 1
    if not others:
        return 0
    gathered = 1 if even else others * (num_rows[rank] > 0)
    return gathered + scatter_calls(num_rows, rank, backend)


def ring_rows(num_rows: Sequence[int], rank: int, *, again: bool = False) -> list[int]:
    """Return the rows of each message that a rank sends in a layer: forward K and V of all ranks except the next one;
    backward those again, and the gradients of all except its own. With `again` the layer is computed twice."""
    ranks = len(num_rows)
    keys = [num_rows[(rank - turn) % ranks] for turn in range(ranks - 1)]
    gradients = [num_rows[(rank - turn) % ranks] for turn in range(1, ranks)]
    return [*keys * (3 if again else 2), *gradients]


def ring_bytes(num_rows: Sequence[int], row_bytes: int, rank: int, *, again: bool = False) -> int:
    """Return the bytes of all these messages."""
    return sum(ring_rows(num_rows, rank, again=again)) * row_bytes


def shift_rows(seen: Sequence[Sequence[int]], rank: int) -> list[int]:
    """Return the rows of each message where keys go directly to the ranks that see them: forward and backward this
    rank's keys that each other rank sees, and the gradients of their keys that this rank sees. `seen[r][s]` is the
    number of keys of rank s that rank r sees."""
    others = [other for other in range(len(seen)) if other != rank]
    keys, gradients = [seen[other][rank] for other in others], [seen[rank][other] for other in others]
    return [*keys, *keys, *gradients]


def even_ring_turns(ranks: int, *, again: bool = False) -> int:
    """Count the messages of a rank in a layer: 3(N-1); with `again`, where the layer is computed twice, 4(N-1)."""
    return (4 if again else 3) * (ranks - 1)


def even_ring_bytes(nbytes: float, ranks: int, *, again: bool = False) -> float:
    """Return `ring_bytes` for ranks with equal numbers of rows; `nbytes` are all of K and V."""
    return even_ring_turns(ranks, again=again) * nbytes / ranks


def ulysses_messages(num_rows: Sequence[int], num_heads: Sequence[int], rank: int, *, again: bool = False) -> list[int]:
    """Return the (row, head) pairs of each message in a layer: forward q, k and v by heads and the result by rows,
    backward the reverse. Each tensor's pairs are counted. With `again` the layer is computed twice."""
    others = [other for other in range(len(num_rows)) if other != rank]
    by_heads = [num_rows[rank] * num_heads[other] for other in others]
    by_rows = [num_rows[other] * num_heads[rank] for other in others]
    forward = [*(3 * pairs for pairs in by_heads), *by_rows]
    return [*forward * (2 if again else 1), *by_heads, *(3 * pairs for pairs in by_rows)]


def ulysses_bytes(num_rows: Sequence[int], num_heads: Sequence[int], head_bytes: int, rank: int) -> int:
    """Return the bytes of all these messages, where a row of one head has `head_bytes`."""
    return sum(ulysses_messages(num_rows, num_heads, rank)) * head_bytes


def causal_share(num_ranks: int) -> float:
    """Return the last of N contiguous ranks' causal work over the mean, in long sequences: (2N-1)/N."""
    return (2 * num_ranks - 1) / num_ranks
