"""Context parallelism: N ranks, of which rank r holds `num_rows[r]` of S positions (Liu et al. 2023, Jacobs et al.
2023).

A row is what one position has: of K and V together 2·b·h numbers, of one head b·h/a. What is uneven is counted as it
is; where all is even, of the bytes of all K and V a rank sends in a layer, forward and backward:

    gathered   2(N-1)/N        ring, zigzag   3(N-1)/N        Ulysses   4(N-1)/N²
    shift      9(N-1)/4N on average, of folded parts
"""

from collections.abc import Sequence

from distlab.techniques.collectives.costs import all_gather_bytes, reduce_scatter_bytes
from distlab.techniques.tensor_parallel.costs import scatter_calls


def gathered_bytes(num_rows: Sequence[int], row_bytes: int, rank: int) -> float:
    """Forward an all_gather of K and V, by the backend where parts are equal; backward a reduce_scatter."""
    nbytes, ranks = sum(num_rows) * row_bytes, len(num_rows)
    gather = "gloo" if len(set(num_rows)) == 1 else "direct"
    return all_gather_bytes(gather, ranks, nbytes, rank, row_bytes) + reduce_scatter_bytes(
        "direct", ranks, nbytes, rank, row_bytes
    )


def gathered_calls(num_rows: Sequence[int], rank: int, backend: str) -> int:
    """A call for an all_gather of equal parts, else a send to each other rank; and those of the reduce_scatter."""
    even, others = len(set(num_rows)) == 1, len(num_rows) - 1
    if not others:
        return 0
    gathered = 1 if even else others * (num_rows[rank] > 0)
    return gathered + scatter_calls(num_rows, rank, backend)


def ring_rows(num_rows: Sequence[int], rank: int, *, again: bool = False) -> list[int]:
    """The rows of each message that a rank sends in a layer: forward K and V of all but the next rank, which has its
    own; backward those again, and the gradients of all but its own. With `again` the layer is computed twice."""
    ranks = len(num_rows)
    keys = [num_rows[(rank - turn) % ranks] for turn in range(ranks - 1)]
    gradients = [num_rows[(rank - turn) % ranks] for turn in range(1, ranks)]
    return [*keys * (3 if again else 2), *gradients]


def ring_bytes(num_rows: Sequence[int], row_bytes: int, rank: int, *, again: bool = False) -> int:
    """What they are together."""
    return sum(ring_rows(num_rows, rank, again=again)) * row_bytes


def shift_rows(seen: Sequence[Sequence[int]], rank: int) -> list[int]:
    """The rows of each message where keys go straight to those that see them, [rank][whose] in number: forward and
    backward what each other rank sees of this one's, and the gradients of what this one sees of theirs."""
    others = [other for other in range(len(seen)) if other != rank]
    keys, gradients = [seen[other][rank] for other in others], [seen[rank][other] for other in others]
    return [*keys, *keys, *gradients]


def even_ring_turns(ranks: int, *, again: bool = False) -> int:
    """Messages of a rank in a layer: 3(N-1), and with `again` the layer is computed twice."""
    return (4 if again else 3) * (ranks - 1)


def even_ring_bytes(nbytes: float, ranks: int, *, again: bool = False) -> float:
    """`ring_bytes` of any number of ranks at once, which have as many rows; `nbytes` are all of K and V."""
    return even_ring_turns(ranks, again=again) * nbytes / ranks


def ulysses_messages(num_rows: Sequence[int], num_heads: Sequence[int], rank: int, *, again: bool = False) -> list[int]:
    """The (row, head) pairs of each message in a layer: q, k and v by heads, the result by rows, and backward the same
    the other way round. A head's row is counted for each tensor. With `again` the layer is computed twice."""
    others = [other for other in range(len(num_rows)) if other != rank]
    by_heads = [num_rows[rank] * num_heads[other] for other in others]
    by_rows = [num_rows[other] * num_heads[rank] for other in others]
    forward = [*(3 * pairs for pairs in by_heads), *by_rows]
    return [*forward * (2 if again else 1), *by_heads, *(3 * pairs for pairs in by_rows)]


def ulysses_bytes(num_rows: Sequence[int], num_heads: Sequence[int], head_bytes: int, rank: int) -> int:
    """What they are together, where a row of one head is `head_bytes`."""
    return sum(ulysses_messages(num_rows, num_heads, rank)) * head_bytes


def causal_share(num_ranks: int) -> float:
    """What the last of N contiguous ranks has to do under a causal mask over the mean, in long sequences: (2N-1)/N."""
    return (2 * num_ranks - 1) / num_ranks
