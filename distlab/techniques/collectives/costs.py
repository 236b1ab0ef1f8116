"""Cost formulas of collectives: bytes, rounds and seconds.

S is always the full tensor: the input of a reduce_scatter, the output of an all_gather. Bytes are those that one `rank`
sends; received bytes are another rank's sent bytes, and a world of one sends nothing. Sources, by the names used below:

  Thakur    Thakur, Rabenseifner, Gropp: Optimization of Collective Communication Operations in MPICH (IJHPCA 2005)
  Patarasuk Patarasuk, Yuan: Bandwidth Optimal All-reduce Algorithms for Clusters of Workstations (JPDC 2009)
  tests     NVIDIA nccl-tests, doc/PERFORMANCE.md
  gloo      the sources of gloo and torch's ProcessGroupGloo, checked against byte counts of the sockets
"""

from collections.abc import Sequence
from typing import NamedTuple


class Cost(NamedTuple):
    """The bytes and messages that one rank sends."""

    nbytes: float = 0.0
    calls: int = 0
    messages: float = 0

    def times(self, number: int) -> "Cost":
        return Cost(number * self.nbytes, number * self.calls, number * self.messages)


def total_cost(*costs: Cost) -> Cost:
    """Return the sum of several costs."""
    return Cost(*(sum(parts) for parts in zip(Cost(), *costs, strict=True)))


def all_reduce_cost(world_size: int, nbytes: int) -> Cost:
    """Return the cost of gloo's all_reduce."""
    return Cost(all_reduce_bytes("gloo", world_size, nbytes), 1, gloo_all_reduce_messages(world_size, nbytes))


def norm_cost(world_size: int, clip: float | None) -> Cost:
    """Return the cost of the global norm, for clipping: an all_reduce of one float64."""
    return all_reduce_cost(world_size, 8) if clip is not None else Cost()


ALGORITHMS = ("gloo", "ring", "direct", "tree", "server", "tcp")
# Largest all_reduce that plain TCP runs through rank 0 (rooted.py in this folder); never with two ranks.
TCP_STAR_BYTES = 512 << 10


def chunk_bytes(world_size: int, nbytes: int, itemsize: int = 4) -> list[int]:
    """Return the bytes of each rank's chunk, in rank order: whole elements, one more on the first ranks."""
    each, more = divmod(nbytes // itemsize, world_size)
    return [(each + (rank < more)) * itemsize for rank in range(world_size)]


def all_reduce_bytes(algorithm: str, world_size: int, nbytes: int, rank: int = 0, itemsize: int = 4) -> float:
    """Return the bytes that `rank` sends in an all_reduce of S bytes; the minimum is 2(N-1)/N·S (Patarasuk, section 3).

    ring, direct, gloo: the minimum, up to the remainder of an uneven division. tree: each of its P = 2^floor(log2 N)
    core ranks sends the minimum, with chunks of P; rank P + i first sends its S to rank i and gets S back at the end.
    server: rank 0 receives (N-1)·S and sends as much. tcp: server up to 512 KiB, direct above.
    """
    core = 1 << (world_size.bit_length() - 1)
    if algorithm == "tcp":
        algorithm = "server" if nbytes <= TCP_STAR_BYTES else "direct"
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
    # After the first half of a ring rank r has the sum of chunk r + 1; so its bytes are those of rank r + 1 in a
    # reduce_scatter.
    owner = (rank + (algorithm == "ring")) % world_size
    return sum(
        half(algorithm, world_size, nbytes, owner, itemsize) for half in (reduce_scatter_bytes, all_gather_bytes)
    )


def reduce_scatter_bytes(algorithm: str, world_size: int, nbytes: int, rank: int = 0, itemsize: int = 4) -> float:
    """Return the bytes that `rank` sends in a reduce_scatter of S bytes for chunk `rank`; the minimum is (N-1)/N·S.

    ring: every chunk but its own, one per round; direct: the same, all at once. tree: rank i also represents P + i,
    whose S it receives first and whose chunk it sends last; halving sends all but these two chunks (Thakur, section
    4.4). server: each sends all to rank 0, which sends each its chunk. gloo: an all_reduce and a slice
    (ProcessGroupGloo): 1.5·S at N=4, not 0.75·S.
    """
    chunks = chunk_bytes(world_size, nbytes, itemsize)
    core = 1 << (world_size.bit_length() - 1)
    if algorithm == "gloo":
        return all_reduce_bytes("gloo", world_size, nbytes, rank, itemsize)
    if rank >= {"server": 1, "tree": core}.get(algorithm, world_size):
        return float(nbytes)
    return float(nbytes - chunks[rank])


def all_gather_bytes(algorithm: str, world_size: int, nbytes: int, rank: int = 0, itemsize: int = 4) -> float:
    """Return the bytes that `rank` sends in an all_gather of chunks, S bytes in total; the minimum is (N-1)/N·S.

    ring: every chunk but its successor's; direct: its own chunk to all others. tree: rank P + i sends its chunk to rank
    i, which doubles with both and sends the S back (Thakur, section 4.2). server: each sends its chunk to rank 0, which
    sends all chunks to everyone. gloo: a ring (gloo/allgather.cc).
    """
    chunks = chunk_bytes(world_size, nbytes, itemsize)
    core = 1 << (world_size.bit_length() - 1)
    if algorithm == "gloo":
        return algorithmic_factor("all_gather", world_size) * nbytes
    if algorithm in ("direct", "tcp"):
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
    """Return the bytes that `rank` sends while blocks double: its own width, then the aligned blocks of 2, 4, ...
    widths, up to half of all."""
    blocks = [1 << level for level in range(len(widths).bit_length() - 1)]
    return sum(sum(widths[rank // block * block :][:block]) for block in blocks)


def algorithmic_factor(op: str, world_size: int) -> float:
    """Return the bytes that a rank sends with the best algorithm, divided by the bytes of the full tensor.

    If ranks differ it is their mean: a broadcast or reduce of S sends (N-1)·S in total by any route, so (N-1)/N·S per
    rank. In an all_to_all every rank keeps its own part, as a scatter's root does. For point-to-point it is 1.
    """
    return 1.0 if op == "send" else (2.0 if op == "all_reduce" else 1.0) * (world_size - 1) / world_size


def busbw_factor(op: str, world_size: int) -> float:
    """busbw = algbw x this factor, algbw = S / time (tests, section "Bus bandwidth")."""
    return 1.0 if op in ("broadcast", "reduce") else algorithmic_factor(op, world_size)


def all_reduce_rounds(algorithm: str, world_size: int) -> int:
    """Return the number of consecutive messages in an all_reduce, each of which costs a latency: 2(N-1) in a ring,
    2·log2 P in a tree (Rabenseifner's, not NCCL's).

    direct: 2; with two ranks 1, as they send each other everything.
    """
    if world_size == 1:
        return 0
    levels = world_size.bit_length() - 1
    folds = 2 if world_size != 1 << levels else 0
    return {
        "direct": min(2, world_size - 1),
        "server": 2,
        "tcp": min(2, world_size - 1),
        "tree": 2 * levels + folds,
    }.get(algorithm, 2 * (world_size - 1))


def all_reduce_seconds(algorithm: str, world_size: int, nbytes: int, latency_s: float, bytes_per_s: float) -> float:
    """Return T = rounds·α + bytes/B, the model of Hockney and of Thakur, section 3; B is a link's, one way.
    Bytes are the consecutive ones on the busiest link. The server receives (N-1)·S and then sends as much.
    """
    serial = max(all_reduce_bytes(algorithm, world_size, nbytes, rank) for rank in range(world_size))
    if algorithm == "server" or (algorithm == "tcp" and nbytes <= TCP_STAR_BYTES and world_size > 2):
        serial *= 2
    if algorithm == "tree" and world_size.bit_count() > 1:
        serial += nbytes  # rank P+i's tensor arrives before the halving
    return all_reduce_rounds(algorithm, world_size) * latency_s + serial / bytes_per_s


# Messages: how many a rank sends in a collective, and the bytes of protocol that each adds.
#
# A message is one tensor, or a part of one, to one rank. gloo adds three frames of 48 B to each: the sender announces
# it, the receiver confirms that its buffer is ready, and a header precedes the bytes (gloo/transport/tcp/pair.cc). A
# rank that sends one and receives one therefore sends 144 B more than the tensor's; this was exact in every collective
# whose sockets were counted. gloo's all_reduce cuts each of its chunks in two, so it has 4(N-1) messages, 577 B per
# other rank. The functions count the messages that `rank` sends, or receives if these are more.

FRAMES_BYTES = 144
# The parts of an uneven tensor differ from the formula by up to one element: 16 B cover it.
TOLERATED_BYTES = 160
GLOO_SEGMENT_BYTES = 1 << 20  # largest segment in gloo's all_reduce


def gloo_all_reduce_messages(world_size: int, nbytes: float) -> int:
    """Return gloo's messages: two or more segments per chunk, each at most 1 MiB, their number a multiple of N
    (gloo/allreduce.cc), sent on in N-1 of the N rounds of both halves."""
    segments = max(2 * world_size, -(-int(nbytes) // GLOO_SEGMENT_BYTES))
    return 2 * (world_size - 1) * -(-segments // world_size)


def all_reduce_messages(algorithm: str, world_size: int, nbytes: int, rank: int = 0, itemsize: int = 4) -> int:
    """Return the messages of an all_reduce of S bytes; a ring sends one chunk per round, a tree one block per level."""
    if algorithm == "gloo":
        return gloo_all_reduce_messages(world_size, nbytes)
    if algorithm == "tcp":
        algorithm = "server" if nbytes <= TCP_STAR_BYTES and world_size > 2 else "direct"
    if algorithm == "direct" and world_size == 2:
        return 1
    if algorithm == "server":
        return world_size - 1 if rank == 0 else 1
    if algorithm == "tree":
        levels, folded, outside = _core(world_size, rank)
        return 1 if outside else 2 * levels + folded
    return 2 * _filled(world_size, nbytes, itemsize)


def half_messages(algorithm: str, op: str, world_size: int, nbytes: int, rank: int = 0, itemsize: int = 4) -> int:
    """Return the messages of a reduce_scatter or an all_gather (`op`) of S bytes in total."""
    if algorithm == "gloo":
        return gloo_all_reduce_messages(world_size, nbytes) if op == "reduce_scatter" else 2 * (world_size - 1)
    if algorithm == "server":
        return world_size - 1 if rank == 0 else 1
    if algorithm == "tree":
        levels, folded, outside = _core(world_size, rank)
        return 1 if outside else levels + folded
    return _filled(world_size, nbytes, itemsize)


def _filled(world_size: int, nbytes: int, itemsize: int) -> int:
    """Return the number of chunks sent, one per other rank or per round; empty chunks are not sent."""
    return min(world_size - 1, sum(chunk > 0 for chunk in chunk_bytes(world_size, nbytes, itemsize)))


def _core(world_size: int, rank: int) -> tuple[int, int, bool]:
    """Return the tree's levels, the messages of `rank` with its folding partner, and whether it folds into another."""
    levels = world_size.bit_length() - 1
    return levels, int(rank + (1 << levels) < world_size), rank >= 1 << levels


def wire_tolerance(predicted: float, messages: float) -> float:
    """Return the allowed error of sent bytes: 1 %, and 160 B per message, of which gloo's frames are 144."""
    return 0.01 * predicted + TOLERATED_BYTES * messages


# Step time: compute, messages as T = rounds·α + bytes/B, their hidden part, and the bubble.
#
# These are estimates, not checks: they show whether a strategy is limited by its link or by its cores. Sources:
# compute Kaplan et al. 2020, "Scaling Laws for Neural Language Models", section 2.1; with recomputation Narayanan et
# al. 2021, "Megatron-LM", section 5.1; α and B Thakur et al. 2005, section 3.

# Title and columns of the table where `comm` stores its fit, for later estimates.
FITTED = "T = rounds·α + bytes/B, fitted to the all_reduce"
LATENCY, RATE = "α, us", "B, GB/s"


def training_flops(num_parameters: float, tokens: float, recompute: str = "none") -> float:
    """Return 6·P per token, 2 forward and 4 backward; 8·P if the forward pass is recomputed. Attention's s·s is not
    included."""
    return (8 if recompute == "full" else 6) * num_parameters * tokens


def attention_flops(num_layers: int, width: int, seq: int, tokens: float, recompute: str = "none") -> float:
    """Return the FLOPs of attention's s·s with a causal mask: forward 2·s·h per token and layer, two products of which
    half is masked; twice that backward, and the forward again if it is recomputed."""
    return (8 if recompute == "full" else 6) * num_layers * width * seq * tokens


def message_seconds(rounds: float, nbytes: float, latency_s: float, bytes_per_s: float) -> float:
    """Return T = rounds·α + bytes/B for consecutive messages on one link."""
    return rounds * latency_s + nbytes / bytes_per_s


def exposed_seconds(communication_s: float, hidden_under_s: float) -> float:
    """Return the part of a communication that is longer than the compute that overlaps it."""
    return max(0.0, communication_s - hidden_under_s)


# The slowest rank's seconds, for which all others wait.


def slowest_of(seconds_by_rank: Sequence[Sequence[float]]) -> list[float]:
    """Return for each interval the time of the slowest rank."""
    return [max(seconds) for seconds in zip(*seconds_by_rank, strict=True)]
