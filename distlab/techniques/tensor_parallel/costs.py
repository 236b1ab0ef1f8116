"""Tensor parallelism: t ranks, L layers, b samples of s positions, width h (Shoeybi et al. 2019, Korthikanti et al.
2022)."""

from collections.abc import Sequence

from distlab.techniques.collectives.costs import all_gather_bytes, all_reduce_bytes, chunk_bytes, reduce_scatter_bytes


def slice_sums(recompute: str = "none") -> int:
    """all_reduces of a sliced part: g's forward, f's backward, and g's once more where all is done again."""
    return 3 if recompute == "full" else 2


def tensor_parallel_bytes(world_size: int, num_slices: int, nbytes: int, recompute: str = "none") -> float:
    """What a rank sends for `num_slices` sliced parts between activations of `nbytes`: 2 all_reduces each, g's and f's.

    A layer of gpt is two slices: 2 all_reduces forward and 2 backward of b·s·h, so 8(t-1)/t·b·s·h elements a layer and
    rank (Shoeybi, section 3, figure 4). Embedding and output layer are one more: the first ends with a g, the other
    begins with an f.
    """
    return slice_sums(recompute) * num_slices * all_reduce_bytes("gloo", world_size, nbytes)


def sequence_parallel_bytes(world_size: int, num_slices: int, num_rows: int, row_bytes: int, rank: int) -> float:
    """The same where rank r keeps chunk r of the rows: each all_reduce is a reduce_scatter and an all_gather (direct).

    A rank with a row more sends more of it and gathers more; all together they send what the all_reduces do
    (Korthikanti, section 4.2.2). Its slices hold their gathered input for the backward pass.
    """
    halves = (reduce_scatter_bytes, all_gather_bytes)
    pair = sum(half("direct", world_size, num_rows * row_bytes, rank, row_bytes) for half in halves)
    return 2 * num_slices * pair


def gathered_again_bytes(world_size: int, num_slices: int, nbytes: int) -> float:
    """What a rank sends more where no slice holds its gathered input, and each gathers it once more in its backward
    pass.

    That is the price of 34/t bytes of activations in place of 26/t + 8 (Korthikanti, section 4.2.2): five all_gathers
    and reduce_scatters of each slice in place of four.
    """
    return num_slices * all_gather_bytes("gloo", world_size, nbytes)


def sequence_parallel_calls(world_size: int, num_slices: int, num_rows: int, rank: int, backend: str) -> int:
    """Its calls: equal chunks are gathered by the backend, in one; others by a send to each rank with a row."""
    rows = chunk_bytes(world_size, num_rows, 1)
    even = num_rows % world_size == 0 and world_size > 1  # a world of one calls nothing
    gathered = world_size - 1 if rows[rank] else 0
    return 2 * num_slices * (scatter_calls(rows, rank, backend) + (1 if even else gathered))


def scatter_calls(num_rows: Sequence[int], rank: int, backend: str) -> int:
    """Those of a reduce_scatter of so many rows a rank: one all_to_all over gloo, one of NCCL's own where all have as
    many; else a send to each other rank that gets a row."""
    ranks = len(num_rows)
    if backend == "gloo" or (backend == "nccl" and len(set(num_rows)) == 1):
        return int(ranks > 1)
    return sum(1 for other in range(ranks) if num_rows[other] and other != rank)


def sequence_parallel_messages(world_size: int, num_slices: int, num_rows: int) -> int:
    """Its messages over gloo: one to each other rank, and in a gather of equal chunks by the backend two."""
    return 2 * num_slices * (world_size - 1) * (3 if num_rows % world_size == 0 else 2)


def column_split_bytes(world_size: int, num_rows: int, inputs: int, outputs: int, itemsize: int) -> float:
    """What a rank sends for one linear layer that is split by outputs alone: all_gather of them, all_reduce for its
    input.

    The gather takes parts of one size: outputs are rounded up to a multiple of t.
    """
    padded = -(-outputs // world_size) * world_size
    gathered = all_gather_bytes("gloo", world_size, num_rows * padded * itemsize)
    return gathered + all_reduce_bytes("gloo", world_size, num_rows * inputs * itemsize)


def parallel_loss_bytes(world_size: int, num_tokens: int, itemsize: int) -> float:
    """A cross-entropy over split scores: a maximum, a sum and the target's score of each token, 3·b·s numbers."""
    return all_reduce_bytes("gloo", world_size, 3 * num_tokens * itemsize)


def sequence_saves_bytes(
    world_size: int, num_norms: int, num_rows: int, row_numel: int, width: int, itemsize: int, rank: int
) -> int:
    """Activations that a rank need not hold for its backward pass if between the blocks it has its own rows alone.

    A norm keeps its input, and a mean and a deviation for each vector: b·s·h + 2·b·s numbers (in Korthikanti's table 2
    it is most of the 10·s·b·h that tensor parallelism leaves whole; there is no dropout here). A row is `row_numel`
    numbers in vectors of `width`. What is gathered for a slice is held whole: to gather it again would send more.
    """
    others = num_rows - chunk_bytes(world_size, num_rows, 1)[rank]
    return num_norms * others * (row_numel + 2 * row_numel // width) * itemsize


# What the forward pass of a transformer leaves for its backward pass: layers of b samples, s positions,
# width h, a heads.
#
# Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", sections 4.1 to 4.3 and 5.
# Theirs is a layer with dropout in 16 bits, so that numbers of 2 bytes are beside dropout masks of 1; here the size of
# a number is a parameter.

RECOMPUTE = ("none", "selective", "full")


def layer_activation_bytes(
    seq: int, samples: int, width: int, heads: int, *, itemsize: int = 2, tensor_ranks: int = 1,
    sequence_parallel: bool = False, recompute: str = "none",
) -> float:  # fmt: skip
    """One layer on one of t ranks. In 16 bits s·b·h(34 + 5as/h); with tensor parallelism s·b·h(10 + 24/t + 5as/(ht)).

    Of the 34 bytes 10 belong to norms, dropouts and inputs of the blocks, which tensor parallelism leaves whole, and
    sequence parallelism cuts too: s·b·h/t(34 + 5as/h). "selective" keeps no scores (flash attention neither): 5as/h
    goes. "full" keeps the layer's input alone, 2·s·b·h.
    """
    tokens, t = seq * samples, tensor_ranks
    if recompute == "full":
        return itemsize * tokens * width / (t if sequence_parallel else 1)
    whole, cut = 4 * itemsize + 2, 12 * itemsize  # 10 and 24: two of the numbers that stay whole are masks of a byte
    scores = (2 * itemsize + 1) * heads * seq / width if recompute == "none" else 0.0
    return tokens * width * (whole / (t if sequence_parallel else 1) + cut / t + scores / t)
