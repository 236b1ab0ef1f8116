"""Collectives: bytes, rounds and seconds.

S is always the whole tensor, as it stands before a reduce_scatter and after an all_gather. Bytes are those that one
`rank` sends; what is received is somebody else's sending, and nothing is sent by a world of one. Sources, by the names
used below:

  Thakur    Thakur, Rabenseifner, Gropp: Optimization of Collective Communication Operations in MPICH (IJHPCA 2005)
  Patarasuk Patarasuk, Yuan: Bandwidth Optimal All-reduce Algorithms for Clusters of Workstations (JPDC 2009)
  tests     NVIDIA nccl-tests, doc/PERFORMANCE.md
  gloo      the sources of gloo and torch's ProcessGroupGloo, and what the sockets counted
"""

from collections.abc import Sequence
from typing import NamedTuple


class Cost(NamedTuple):
    """What a rank sends."""

    nbytes: float = 0.0
    calls: int = 0
    messages: float = 0

    def times(self, number: int) -> "Cost":
        return Cost(number * self.nbytes, number * self.calls, number * self.messages)


def total_cost(*costs: Cost) -> Cost:
    """All of them together."""
    return Cost(*(sum(parts) for parts in zip(Cost(), *costs, strict=True)))


def all_reduce_cost(world_size: int, nbytes: int) -> Cost:
    """An all_reduce of gloo's."""
    return Cost(all_reduce_bytes("gloo", world_size, nbytes), 1, gloo_all_reduce_messages(world_size, nbytes))


def norm_cost(world_size: int, clip: float | None) -> Cost:
    """Where gradients are clipped, the sum of their squares: one number in float64."""
    return all_reduce_cost(world_size, 8) if clip is not None else Cost()


ALGORITHMS = ("gloo", "ring", "direct", "tree", "server", "tcp")
# Up to which plain TCP sums by rank 0 (distlab/techniques/collectives/rooted.py), of two ranks none.
TCP_STAR_BYTES = 512 << 10


def chunk_bytes(world_size: int, nbytes: int, itemsize: int = 4) -> list[int]:
    """Bytes of each rank's chunk, in rank order: whole elements, the first ranks one more (as torch.tensor_split)."""
    each, more = divmod(nbytes // itemsize, world_size)
    return [(each + (rank < more)) * itemsize for rank in range(world_size)]


def all_reduce_bytes(algorithm: str, world_size: int, nbytes: int, rank: int = 0, itemsize: int = 4) -> float:
    """Bytes that `rank` sends in an all_reduce of S bytes; 2(N-1)/N·S is the least (Patarasuk, section 3).

    ring, direct and gloo send it, up to the rest of an uneven division. tree: so does each of its P = 2^floor(log2 N)
    core ranks, on chunks of P, and rank P + i sends its S to rank i before and gets S back after. server: rank 0 sends
    the sum to everyone, (N-1)·S, and receives as much. tcp: as the server up to 512 KiB, above as direct.
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
    # In the ring rank r ends the first half with the sum of chunk r + 1: it stands where r + 1 stands in a
    # reduce_scatter.
    owner = (rank + (algorithm == "ring")) % world_size
    return sum(
        half(algorithm, world_size, nbytes, owner, itemsize) for half in (reduce_scatter_bytes, all_gather_bytes)
    )


def reduce_scatter_bytes(algorithm: str, world_size: int, nbytes: int, rank: int = 0, itemsize: int = 4) -> float:
    """Bytes that `rank` sends in a reduce_scatter of S bytes that leaves it chunk `rank`; (N-1)/N·S is the least.

    ring: every chunk but its own, one a round; direct: the same, all at once. tree: rank i stands for P + i too, whose
    S it gets first and whose chunk it sends last; halving sends all but these two chunks (Thakur, section 4.4). server:
    the whole to rank 0, which sends each its chunk. gloo's is an all_reduce and a slice (ProcessGroupGloo): 1.5·S at
    N=4, not 0.75·S.
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

    ring: passes on every chunk but the one that its successor owns; direct: its own chunk to all others. tree: rank P +
    i sends its chunk to rank i, which doubles with both and sends the S back (Thakur, section 4.2). server: each its
    chunk to rank 0, which sends the whole to everyone. gloo's is a ring (gloo/allgather.cc).
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
    """What `rank` sends while blocks double: its own width, then the aligned 2, 4, ... widths around it, up to half of
    all."""
    blocks = [1 << level for level in range(len(widths).bit_length() - 1)]
    return sum(sum(widths[rank // block * block :][:block]) for block in blocks)


def algorithmic_factor(op: str, world_size: int) -> float:
    """Bytes sent a rank, over the bytes of the whole tensor, by the best algorithm: makes called bytes of bytes in a
    call.

    Where ranks differ it is their mean: a broadcast or reduce of S sends (N-1)·S in all however it is routed, so
    (N-1)/N·S a rank. An all_to_all keeps its own part, as a scatter's root does. Point-to-point: what is sent is sent.
    """
    return 1.0 if op == "send" else (2.0 if op == "all_reduce" else 1.0) * (world_size - 1) / world_size


def busbw_factor(op: str, world_size: int) -> float:
    """busbw = algbw x this factor, algbw = S / time (tests, section "Bus bandwidth")."""
    return 1.0 if op in ("broadcast", "reduce") else algorithmic_factor(op, world_size)


def all_reduce_rounds(algorithm: str, world_size: int) -> int:
    """Messages that follow each other in an all_reduce, each costing a latency: 2(N-1) in a ring, 2·log2 P in a tree
    (Rabenseifner's, not NCCL's).

    direct: 2, and 1 between two ranks, which send each other everything.
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
    """T = rounds·α + bytes/B, the model of Hockney and of Thakur, section 3; B is a full-duplex link's, one way.

    Bytes are what follows each other on the busiest link. The server's wall: it receives (N-1)·S, then sends as much.
    """
    serial = max(all_reduce_bytes(algorithm, world_size, nbytes, rank) for rank in range(world_size))
    if algorithm == "server" or (algorithm == "tcp" and nbytes <= TCP_STAR_BYTES and world_size > 2):
        serial *= 2
    if algorithm == "tree" and world_size.bit_count() > 1:
        serial += nbytes  # the fold is received before the halving begins
    return all_reduce_rounds(algorithm, world_size) * latency_s + serial / bytes_per_s


# Messages: how many a rank sends in a collective, and what each costs on the wire beside its bytes.
#
# A message is one tensor, or one part of it, to one rank. gloo frames each by 48 B three times: its sender announces
# it, its receiver answers that the buffer is there, and a header goes before the bytes (gloo/transport/tcp/pair.cc).
# So who sends one and receives one sends 144 B more than the tensor has; to the byte in every collective that the
# sockets were read for. An all_reduce of gloo cuts each of its chunks in two, so it is 4(N-1) messages, the 577 B
# that it seems to add for each other rank. What is said here of `rank` is how many it sends, or receives where these
# are more.

FRAMES_BYTES = 144
# gloo sends the parts of an uneven tensor one element longer or shorter than the formula's: 16 B cover it.
TOLERATED_BYTES = 160
GLOO_SEGMENT_BYTES = 1 << 20  # the most of a tensor that gloo's all_reduce sends at a time


def gloo_all_reduce_messages(world_size: int, nbytes: float) -> int:
    """Two segments of each chunk or more, so that none is above 1 MiB: a multiple of N (gloo/allreduce.cc), each sent
    on in N-1 of the N rounds of both halves."""
    segments = max(2 * world_size, -(-int(nbytes) // GLOO_SEGMENT_BYTES))
    return 2 * (world_size - 1) * -(-segments // world_size)


def all_reduce_messages(algorithm: str, world_size: int, nbytes: int, rank: int = 0, itemsize: int = 4) -> int:
    """Of an all_reduce of S bytes; a ring sends a chunk a round, a tree a block a level."""
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
    """Of a reduce_scatter or an all_gather (`op`) of S bytes in all."""
    if algorithm == "gloo":
        return gloo_all_reduce_messages(world_size, nbytes) if op == "reduce_scatter" else 2 * (world_size - 1)
    if algorithm == "server":
        return world_size - 1 if rank == 0 else 1
    if algorithm == "tree":
        levels, folded, outside = _core(world_size, rank)
        return 1 if outside else levels + folded
    return _filled(world_size, nbytes, itemsize)


def _filled(world_size: int, nbytes: int, itemsize: int) -> int:
    """Chunks that are sent, one to each other rank or one in each round: an empty one is not."""
    return min(world_size - 1, sum(chunk > 0 for chunk in chunk_bytes(world_size, nbytes, itemsize)))


def _core(world_size: int, rank: int) -> tuple[int, int, bool]:
    """Levels of the tree, messages that `rank` exchanges with one that folds into it, and whether it folds itself."""
    levels = world_size.bit_length() - 1
    return levels, int(rank + (1 << levels) < world_size), rank >= 1 << levels


def wire_tolerance(predicted: float, messages: float) -> float:
    """How far wire bytes may be off: 1 %, and 160 B for each message, of which gloo's frames are 144."""
    return 0.01 * predicted + TOLERATED_BYTES * messages


# What a step takes: compute, messages as T = rounds·α + bytes/B, what of them is hidden, and the bubble.
#
# Estimates, not checks: they tell a strategy that is bound by its link from one that is bound by its cores. Sources:
# compute Kaplan et al. 2020, "Scaling Laws for Neural Language Models", section 2.1; with recomputation Narayanan et
# al. 2021, "Megatron-LM", section 5.1; α and B Thakur et al. 2005, section 3.

# Heading and columns of the table in which `comm` leaves what it fitted, for whoever calculates with it.
FITTED = "T = rounds·α + bytes/B, fitted to the all_reduce"
LATENCY, RATE = "α, us", "B, GB/s"


def training_flops(num_parameters: float, tokens: float, recompute: str = "none") -> float:
    """6·P a token, 2 forward and 4 backward; 8·P if the whole forward pass is done again. Attention's own s·s is left
    out."""
    return (8 if recompute == "full" else 6) * num_parameters * tokens


def attention_flops(num_layers: int, width: int, seq: int, tokens: float, recompute: str = "none") -> float:
    """Attention's own s·s under a causal mask: forward 2·s·h a token and layer, two products of which half is masked;
    backward twice that, and forward once more if that is done again."""
    return (8 if recompute == "full" else 6) * num_layers * width * seq * tokens


def message_seconds(rounds: float, nbytes: float, latency_s: float, bytes_per_s: float) -> float:
    """T = rounds·α + bytes/B for what follows each other on one link."""
    return rounds * latency_s + nbytes / bytes_per_s


def exposed_seconds(communication_s: float, hidden_under_s: float) -> float:
    """What is left of a communication that runs beside so much compute."""
    return max(0.0, communication_s - hidden_under_s)


# The seconds of the slowest rank, which all others wait for.


def slowest_of(everyone: Sequence[Sequence[float]]) -> list[float]:
    """Of each of several stretches, of all ranks' seconds for each."""
    return [max(of_stretch) for of_stretch in zip(*everyone, strict=True)]
