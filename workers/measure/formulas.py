"""Every prediction, once: bytes on the wire and in memory, rounds and seconds of a collective, as the papers give them.

Pure functions of sizes. N is `world_size`, S is `nbytes`: always the whole tensor, as it stands before a reduce_scatter
and after an all_gather. Bytes are those that one `rank` sends; what is received is somebody else's sending, and nothing is
sent by a world of one. Sources, by the names used below:

  Thakur    Thakur, Rabenseifner, Gropp: Optimization of Collective Communication Operations in MPICH (IJHPCA 2005)
  Patarasuk Patarasuk, Yuan: Bandwidth Optimal All-reduce Algorithms for Clusters of Workstations (JPDC 2009)
  tests     NVIDIA nccl-tests, doc/PERFORMANCE.md
  gloo      the sources of gloo and torch's ProcessGroupGloo, and what the sockets counted
"""

from dataclasses import dataclass

ALGORITHMS = ("gloo", "ring", "direct", "tree", "server")


@dataclass(frozen=True)
class Prediction:
    """What one variant should measure in a step: a value a rank, in `unit`, by `formula`, in `calls` calls a rank."""

    variant: str
    name: str  # as the comparison: "wire bytes", "called bytes", ...
    unit: str
    formula: str
    value: tuple[float, ...]
    calls: int
    decides: bool = True  # False for PyTorch's own variants, which are only shown


def chunk_bytes(world_size: int, nbytes: int, itemsize: int = 4) -> list[int]:
    """Bytes of each rank's chunk, in rank order: whole elements, the first ranks one more (as torch.tensor_split)."""
    each, more = divmod(nbytes // itemsize, world_size)
    return [(each + (rank < more)) * itemsize for rank in range(world_size)]


def all_reduce_bytes(algorithm: str, world_size: int, nbytes: int, rank: int = 0, itemsize: int = 4) -> float:
    """Bytes that `rank` sends in an all_reduce of S bytes; 2(N-1)/N·S is the least (Patarasuk, section 3).

    ring, direct and gloo send it, up to the rest of an uneven division. tree: so does each of its P = 2^floor(log2 N) core
    ranks, on chunks of P, and rank P + i sends its S to rank i before and gets S back after. server: rank 0 sends the sum to
    everyone, (N-1)·S, and receives as much.
    """
    core = 1 << (world_size.bit_length() - 1)
    if algorithm == "gloo":  # a ring, in even segments (gloo/allreduce.cc)
        return algorithmic_factor("all_reduce", world_size) * nbytes
    if algorithm == "server":
        return float(nbytes if rank else (world_size - 1) * nbytes)
    if algorithm == "tree" and rank >= core:
        return float(nbytes)
    if algorithm == "tree":
        widths = chunk_bytes(core, nbytes, itemsize)
        return float(
            nbytes - widths[rank] + _doubling_bytes(widths, rank) + (nbytes if rank + core < world_size else 0)
        )
    # In the ring rank r ends the first half with the sum of chunk r + 1: it stands where r + 1 stands in a reduce_scatter.
    owner = (rank + (algorithm == "ring")) % world_size
    return sum(
        half(algorithm, world_size, nbytes, owner, itemsize) for half in (reduce_scatter_bytes, all_gather_bytes)
    )


def reduce_scatter_bytes(algorithm: str, world_size: int, nbytes: int, rank: int = 0, itemsize: int = 4) -> float:
    """Bytes that `rank` sends in a reduce_scatter of S bytes that leaves it chunk `rank`; (N-1)/N·S is the least.

    ring: every chunk but its own, one a round; direct: the same, all at once. tree: rank i stands for P + i too, whose S it
    gets first and whose chunk it sends last; halving sends all but these two chunks (Thakur, section 4.4). server: the whole to
    rank 0, which sends each its chunk. gloo's is an all_reduce and a slice (ProcessGroupGloo): 1.5·S at N=4, not 0.75·S.
    """
    chunks = chunk_bytes(world_size, nbytes, itemsize)
    core = 1 << (world_size.bit_length() - 1)
    if algorithm == "gloo":
        return all_reduce_bytes("gloo", world_size, nbytes, rank, itemsize)
    if rank >= {"server": 1, "tree": core}.get(algorithm, world_size):
        return float(nbytes)
    return float(nbytes - chunks[rank])


def all_gather_bytes(algorithm: str, world_size: int, nbytes: int, rank: int = 0, itemsize: int = 4) -> float:
    """Bytes that `rank` sends in an all_gather of chunks that are S bytes together; (N-1)/N·S is the least.

    ring: passes on every chunk but the one that its successor owns; direct: its own chunk to all others. tree: rank P + i
    sends its chunk to rank i, which doubles with both and sends the S back (Thakur, section 4.2). server: each its chunk to rank
    0, which sends the whole to everyone. gloo's is a ring (gloo/allgather.cc).
    """
    chunks = chunk_bytes(world_size, nbytes, itemsize)
    core = 1 << (world_size.bit_length() - 1)
    if algorithm == "gloo":
        return algorithmic_factor("all_gather", world_size) * nbytes
    if algorithm == "direct":
        return float((world_size - 1) * chunks[rank])
    if algorithm == "ring":
        return float(nbytes - chunks[(rank + 1) % world_size])
    if algorithm == "server":
        return float(chunks[rank] if rank else (world_size - 1) * nbytes)
    if rank >= core:
        return float(chunks[rank])
    pairs = [sum(chunks[index::core]) for index in range(core)]
    return float(_doubling_bytes(pairs, rank) + (nbytes if rank + core < world_size else 0))


def _doubling_bytes(widths: list[int], rank: int) -> int:
    """What `rank` sends while blocks double: its own width, then the aligned 2, 4, ... widths around it, up to half of all."""
    blocks = [1 << level for level in range(len(widths).bit_length() - 1)]
    return sum(sum(widths[rank // block * block :][:block]) for block in blocks)


def rooted_bytes(op: str, world_size: int, nbytes: int, rank: int, root: int = 0) -> float:
    """Bytes that `rank` sends in a broadcast, reduce, scatter or gather of a whole of S bytes, as gloo routes them.

    broadcast: a binomial tree (gloo/broadcast.cc): the v-th after the root sends S to v + 2^k, for all 2^k > v. reduce: a
    ring reduce_scatter, then every chunk to the root (gloo/reduce.cc): up to a third of S more than this was seen at
    12 MiB, where segments of 1 MiB at most do not divide the ring. scatter, gather: direct.
    """
    part = nbytes / world_size
    if op == "broadcast":
        place = (rank - root) % world_size
        steps = (1 << level for level in range(place.bit_length(), world_size.bit_length()))
        return float(nbytes * sum(place + step < world_size for step in steps))
    if op == "scatter":
        return nbytes - part if rank == root else 0.0
    to_root = 0.0 if rank == root else part
    return to_root + (nbytes - part if op == "reduce" and world_size > 1 else 0.0)


def algorithmic_factor(op: str, world_size: int) -> float:
    """Bytes sent a rank, over the bytes of the whole tensor, by the best algorithm: makes called bytes of bytes in a call.

    Where ranks differ it is their mean: a broadcast or reduce of S sends (N-1)·S in all however it is routed, so
    (N-1)/N·S a rank. An all_to_all keeps its own part, as a scatter's root does. Point-to-point: what is sent is sent.
    """
    return 1.0 if op == "send" else (2.0 if op == "all_reduce" else 1.0) * (world_size - 1) / world_size


def busbw_factor(op: str, world_size: int) -> float:
    """busbw = algbw x this factor, algbw = S / time (tests, section "Bus bandwidth")."""
    return 1.0 if op in ("broadcast", "reduce") else algorithmic_factor(op, world_size)


def all_reduce_rounds(algorithm: str, world_size: int) -> int:
    """Messages that follow each other in an all_reduce, each costing a latency: 2(N-1) in a ring, 2·log2 P in a tree."""
    if world_size == 1:
        return 0
    levels = world_size.bit_length() - 1
    folds = 2 if world_size != 1 << levels else 0
    return {"direct": 2, "server": 2, "tree": 2 * levels + folds}.get(algorithm, 2 * (world_size - 1))


def all_reduce_seconds(algorithm: str, world_size: int, nbytes: int, latency_s: float, bytes_per_s: float) -> float:
    """T = rounds·α + bytes/B, the model of Hockney and of Thakur, section 3; B is a full-duplex link's, one way.

    Bytes are what follows each other on the busiest link. The server's wall: it receives (N-1)·S, then sends as much.
    """
    serial = max(all_reduce_bytes(algorithm, world_size, nbytes, rank) for rank in range(world_size))
    if algorithm == "server":
        serial *= 2
    if algorithm == "tree" and world_size.bit_count() > 1:
        serial += nbytes  # the fold is received before the halving begins
    return all_reduce_rounds(algorithm, world_size) * latency_s + serial / bytes_per_s


def wire_tolerance(predicted: float, calls: float, group_size: int) -> float:
    """How far wire bytes may be off: 1 %, and 1 KiB for each call and other rank (gloo's headers are about 577 B of it)."""
    return 0.01 * predicted + 1024 * calls * (group_size - 1)


# --- pipelines: p ranks, m microbatches, v stages a rank (Narayanan et al. 2021, "Megatron-LM", section 2.2) ---


def bubble(ranks: int, microbatches: int, chunks: int = 1) -> float:
    """The part of all ranks' time that idles: (p-1)/(m+p-1), with chunks (p-1)/(v·m+p-1).

    With chunks a microbatch comes back to a rank after p others. Where there are fewer, m < p, the first rank waits for it:
    a step takes the time of p + (m-1)/v microbatches (by simulation; Megatron allows multiples of p alone).
    """
    if chunks > 1 and microbatches < ranks:
        return 1 - microbatches / (ranks + (microbatches - 1) / chunks)
    return (ranks - 1) / (chunks * microbatches + ranks - 1)


def in_flight(schedule: str, ranks: int, microbatches: int, rank: int) -> int:
    """Microbatches that `rank` holds for their backward pass at most: min(m, p-r) in 1f1b, m in gpipe, 1 in naive."""
    return {"naive": 1, "gpipe": microbatches, "1f1b": min(microbatches, ranks - rank)}[schedule]


def pipeline_ends(ranks: int, chunks: int, rank: int) -> int:
    """Ends of `rank`'s stages with another rank behind them: at each it sends an activation, or a gradient, a microbatch.

    One for the first and the last rank and two between, and with v chunks 2v, less the model's own two ends.
    """
    return 0 if ranks == 1 else 2 * chunks - (rank == 0) - (rank == ranks - 1)


# --- tensor parallelism: t ranks, L layers, b samples of s positions, width h (Shoeybi et al. 2019, Korthikanti et al. 2022) ---


def tensor_parallel_bytes(world_size: int, num_slices: int, nbytes: int) -> float:
    """What a rank sends for `num_slices` sliced parts between activations of `nbytes`: 2 all_reduces each, g's and f's.

    A layer of gpt is two slices: 2 all_reduces forward and 2 backward of b·s·h, so 8(t-1)/t·b·s·h elements a layer and rank
    (Shoeybi, section 3, figure 4). Embedding and output layer are one more: the first ends with a g, the other begins with an f.
    """
    return 2 * num_slices * all_reduce_bytes("gloo", world_size, nbytes)


def sequence_parallel_bytes(world_size: int, num_slices: int, num_rows: int, row_bytes: int, rank: int) -> float:
    """The same where rank r keeps chunk r of the rows: each all_reduce is a reduce_scatter and an all_gather (direct).

    A rank with a row more sends more of it and gathers more; all together they send what the all_reduces do (Korthikanti,
    section 4.2.2).
    """
    halves = (reduce_scatter_bytes, all_gather_bytes)
    pair = sum(half("direct", world_size, num_rows * row_bytes, rank, row_bytes) for half in halves)
    return 2 * num_slices * pair


def sequence_parallel_calls(world_size: int, num_slices: int, num_rows: int, rank: int, backend: str) -> int:
    """Its calls: equal chunks are gathered by the backend, in one; others, and what gloo scatters, by a send for each.

    A rank sends to every other rank, where there is a row to send.
    """
    rows = chunk_bytes(world_size, num_rows, 1)
    even = num_rows % world_size == 0 and world_size > 1  # a world of one calls nothing
    scattered = sum(1 for other in range(world_size) if rows[other] and other != rank)
    gathered = world_size - 1 if rows[rank] else 0
    return 2 * num_slices * ((1 if even and backend == "nccl" else scattered) + (1 if even else gathered))


def column_split_bytes(world_size: int, num_rows: int, inputs: int, outputs: int, itemsize: int) -> float:
    """What a rank sends for one linear layer that is split by outputs alone: all_gather of them, all_reduce for its input.

    The gather takes parts of one size: outputs are rounded up to a multiple of t.
    """
    padded = -(-outputs // world_size) * world_size
    gathered = all_gather_bytes("gloo", world_size, num_rows * padded * itemsize)
    return gathered + all_reduce_bytes("gloo", world_size, num_rows * inputs * itemsize)


def parallel_loss_bytes(world_size: int, num_tokens: int, itemsize: int) -> float:
    """A cross-entropy over split scores: of each token a maximum, a sum and the target's score, b·s numbers in place of b·s·v."""
    return all_reduce_bytes("gloo", world_size, 3 * num_tokens * itemsize)


def sequence_saves_bytes(
    world_size: int, num_norms: int, num_rows: int, row_numel: int, width: int, itemsize: int, rank: int
) -> int:
    """Activations that a rank need not hold for its backward pass if between the blocks it has its own rows alone.

    A norm keeps its input, and a mean and a deviation for each vector: b·s·h + 2·b·s numbers (in Korthikanti's table 2 it is
    most of the 10·s·b·h that tensor parallelism leaves whole; there is no dropout here). A row is `row_numel` numbers in
    vectors of `width`. What is gathered for a slice is held whole: to gather it again would send more.
    """
    others = num_rows - chunk_bytes(world_size, num_rows, 1)[rank]
    return num_norms * others * (row_numel + 2 * row_numel // width) * itemsize


# --- ZeRO: N ranks, S bytes of parameters, as many of gradients (Rajbhandari et al. 2020, section 7) ---


def zero_bytes(stage: int, world_size: int, nbytes: float, microbatches: int = 1, gathers: int = 2) -> float:
    """What a rank sends in a step for parameters of `nbytes`: each sum and each gather of them is (N-1)/N·S.

    Stage 1 sums and gathers once. Stage 2 sums after each microbatch, since it keeps no gradients: (M+1)(N-1)/N·S. Stage 3
    gathers for each, too, forward and backward, or in one of `gathers` if the weights stay: 3M(N-1)/N·S or 2M(N-1)/N·S.
    """
    moves = {1: 2, 2: microbatches + 1, 3: microbatches * (gathers + 1)}[stage]
    return moves * algorithmic_factor("all_gather", world_size) * nbytes


def fully_shard_bytes(world_size: int, nbytes: float, kept: float, microbatches: int, backend: str) -> float:
    """The same for PyTorch's fully_shard, which keeps `kept` bytes of parameters gathered until their backward pass.

    gloo's reduce_scatter is an all_reduce: 4(N-1)/N·S, where NCCL sends 3(N-1)/N·S.
    """
    sums = 2 if backend == "gloo" else 1
    return microbatches * algorithmic_factor("all_gather", world_size) * (2 * nbytes - kept + sums * nbytes)


# --- what stands in memory between two steps, of P parameters (Rajbhandari et al. 2020, "ZeRO", section 3.1 and figure 1) ---

# Adam in mixed precision, bytes a parameter, in float32 but for the first two. "Four times the half-precision weights", 56 GB for
# 7 billion, forgets what the optimizer keeps.
MIXED_PRECISION = {"weights": 2, "gradients": 2, "master weights": 4, "first moments": 4, "second moments": 4}


def mixed_precision_bytes(num_parameters: float) -> float:
    """2 + 2 + 4 + 4 + 4 = 16 bytes a parameter: 112 GB for 7 billion, before the first activation."""
    return sum(MIXED_PRECISION.values()) * num_parameters


def rest_bytes(
    stage: int, num_parameters: float, held: float, *, itemsize: int = 4, moments: int = 2, masters: bool = False,
    num_tensors: int = 0,
) -> dict[str, float]:  # fmt: skip
    """Bytes of weights, gradients and optimizer state on one rank, by class; `held` parameters are its own, P/N if shards are even.

    stage 0 keeps all, 1 shards the optimizer's state, 2 the gradients too, 3 the weights too. In float32 with Adam's two
    `moments` 16P, (8+8/N)P, (4+12/N)P, 16P/N. With `masters` weights and gradients are of `itemsize` and the optimizer keeps the
    weights and its moments in float32: in half precision (4+12)P, (4+12/N)P, (2+14/N)P, 16P/N. SGD has no moments. torch's
    AdamW counts its steps once a tensor that it steps: 4 bytes for each of `num_tensors`.
    """
    weights, gradients, stepped = (held if stage >= first else num_parameters for first in (3, 2, 1))
    remembered = moments * (4 if masters else itemsize) + (4 if masters else 0)
    return {
        "parameters": itemsize * weights,
        "gradients": itemsize * gradients,
        "optimizer": remembered * stepped + 4 * num_tensors,
    }
