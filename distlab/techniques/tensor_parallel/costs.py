"""Tensor parallelism: t ranks, L layers, b samples of s positions, width h (Shoeybi et al. 2019, Korthikanti et al.
2022)."""

from collections.abc import Sequence

from distlab.techniques.collectives.costs import all_gather_bytes, all_reduce_bytes, chunk_bytes, reduce_scatter_bytes


def slice_sums(recompute: str = "none") -> int:
    """Count the all_reduces of a slice: g's forward, f's backward, and g's once more where layers are recomputed."""
    return 3 if recompute == "full" else 2


def tensor_parallel_bytes(world_size: int, num_slices: int, nbytes: int, recompute: str = "none") -> float:
    """Return what a rank sends for `num_slices` slices between activations of `nbytes`: 2 all_reduces each, of g and f.

    A layer of gpt has two slices: 2 all_reduces forward and 2 backward of b·s·h, so 8(t-1)/t·b·s·h elements per layer
    and rank (Shoeybi, section 3, figure 4). Embedding and output layer are one slice more: the first ends with g, the
    other begins with f.
    """
    return slice_sums(recompute) * num_slices * all_reduce_bytes("gloo", world_size, nbytes)


def sequence_parallel_bytes(world_size: int, num_slices: int, num_rows: int, row_bytes: int, rank: int) -> float:
    """Return the same where rank r keeps chunk r of the rows: each all_reduce is a reduce_scatter and an all_gather
    (direct).

    A rank with one more row sends and gathers more; all ranks together send what the all_reduces do (Korthikanti,
    section 4.2.2). The slices keep their gathered input for the backward pass.
    """
    halves = (reduce_scatter_bytes, all_gather_bytes)
    pair = sum(half("direct", world_size, num_rows * row_bytes, rank, row_bytes) for half in halves)
    return 2 * num_slices * pair


def gathered_again_bytes(world_size: int, num_slices: int, nbytes: int) -> float:
    """Return what a rank sends in addition where slices do not keep their gathered input, and gather it again in the
    backward pass.

    In exchange a rank keeps 34/t bytes of activations in place of 26/t + 8 (Korthikanti, section 4.2.2). Each slice
    makes five all_gathers and reduce_scatters in place of four.
    """
    return num_slices * all_gather_bytes("gloo", world_size, nbytes)


def sequence_parallel_calls(world_size: int, num_slices: int, num_rows: int, rank: int, backend: str) -> int:
    """Count the calls: the backend gathers equal chunks in one; others take a send to each rank with a row."""
    rows = chunk_bytes(world_size, num_rows, 1)
    even = num_rows % world_size == 0 and world_size > 1  # a world of one calls nothing
    gathered = world_size - 1 if rows[rank] else 0
    return 2 * num_slices * (scatter_calls(rows, rank, backend) + (1 if even else gathered))


def scatter_calls(num_rows: Sequence[int], rank: int, backend: str) -> int:
    """Count the calls of a reduce_scatter of so many rows per rank: one all_to_all over gloo; with NCCL one
    reduce_scatter where all ranks have equally many; otherwise a send to each other rank that gets a row."""
    ranks = len(num_rows)
    if backend == "gloo" or (backend == "nccl" and len(set(num_rows)) == 1):
        return int(ranks > 1)
    return sum(1 for other in range(ranks) if num_rows[other] and other != rank)


def sequence_parallel_messages(world_size: int, num_slices: int, num_rows: int) -> int:
    """Count the messages over gloo: one to each other rank, and two where the backend gathers equal chunks."""
    return 2 * num_slices * (world_size - 1) * (3 if num_rows % world_size == 0 else 2)


def column_split_bytes(world_size: int, num_rows: int, inputs: int, outputs: int, itemsize: int) -> float:
    """Return what a rank sends for one linear layer split by outputs only: an all_gather of the outputs, and an
    all_reduce of the gradient of its input.

    The all_gather takes parts of one size: outputs are rounded up to a multiple of t.
    """
    padded = -(-outputs // world_size) * world_size
    gathered = all_gather_bytes("gloo", world_size, num_rows * padded * itemsize)
    return gathered + all_reduce_bytes("gloo", world_size, num_rows * inputs * itemsize)


def parallel_loss_bytes(world_size: int, num_tokens: int, itemsize: int) -> float:
    """Return what a rank sends for a cross-entropy over split scores: 3 numbers per token."""
    return all_reduce_bytes("gloo", world_size, 3 * num_tokens * itemsize)


def sequence_saves_bytes(
    world_size: int, num_norms: int, num_rows: int, row_numel: int, width: int, itemsize: int, rank: int
) -> int:
    """Return the activation bytes that a rank saves if it has only its own rows between the blocks.

    A norm keeps its input, and a mean and a deviation per vector: b·s·h + 2·b·s numbers (in Korthikanti's table 2 most
    of the 10·s·b·h that tensor parallelism leaves whole; there is no dropout here). A row is `row_numel` numbers in
    vectors of `width`. A slice keeps its whole gathered input: gathering it again would send more.
    """
    others = num_rows - chunk_bytes(world_size, num_rows, 1)[rank]
    return num_norms * others * (row_numel + 2 * row_numel // width) * itemsize


# Activations that the forward pass of a transformer keeps for its backward pass: layers of b samples, s positions,
# width h, a heads.
#
# Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", sections 4.1 to 4.3 and 5.
# They count a layer with dropout in 16 bits: numbers of 2 bytes and dropout masks of 1. Here the size of a number is a
# parameter.

RECOMPUTE = ("none", "selective", "full")


def layer_activation_bytes(
    seq: int, samples: int, width: int, heads: int, *, itemsize: int = 2, tensor_ranks: int = 1,
    sequence_parallel: bool = False, recompute: str = "none",
) -> float:  # fmt: skip
    """Return the bytes of one layer on one of t ranks. In 16 bits s·b·h(34 + 5as/h); with tensor parallelism
    s·b·h(10 + 24/t + 5as/(ht)).

    Of the 34 bytes 10 belong to norms, dropouts and inputs of the blocks, which tensor parallelism leaves whole.
    Sequence parallelism cuts them too: s·b·h/t(34 + 5as/h). "selective" keeps no scores, nor does flash attention:
    without 5as/h. "full" keeps only the layer's input, 2·s·b·h.
    """
    tokens, t = seq * samples, tensor_ranks
    if recompute == "full":
        return itemsize * tokens * width / (t if sequence_parallel else 1)
    uncut, cut = 4 * itemsize + 2, 12 * itemsize  # 10 and 24: two of those that stay whole are masks of one byte
    scores = (2 * itemsize + 1) * heads * seq / width if recompute == "none" else 0.0
    return tokens * width * (uncut / (t if sequence_parallel else 1) + cut / t + scores / t)
