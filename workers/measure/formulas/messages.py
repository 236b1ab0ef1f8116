"""Messages: how many a rank sends in a collective, and what each costs on the wire beside its bytes.

A message is one tensor, or one part of it, to one rank. gloo frames each by 48 B three times: its sender announces it,
its receiver answers that the buffer is there, and a header goes before the bytes (gloo/transport/tcp/pair.cc). So who
sends one and receives one sends 144 B more than the tensor has; to the byte in every collective that the sockets were
read for. An all_reduce of gloo cuts each of its chunks in two, so it is 4(N-1) messages, the 577 B that it seems to add
for each other rank. What is said here of `rank` is how many it sends, or receives where these are more.
"""

from workers.measure.formulas.collectives import TCP_STAR_BYTES, chunk_bytes

FRAMES_BYTES = 144
# gloo sends the parts of an uneven tensor one element longer or shorter than the formula's: 16 B cover it.
TOLERATED_BYTES = 160
TCP_PAIRS_BYTES = 4 << 20  # above which plain TCP cuts messages (workers/parallel/pairs.py)
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
        cut, small = nbytes > TCP_PAIRS_BYTES and world_size % 2 == 0, nbytes <= TCP_STAR_BYTES and world_size > 2
        algorithm = "blocks" if cut else "server" if small else "direct"
    if algorithm == "blocks":  # of 1 MiB, of every chunk there and of its sum back
        return 2 * (world_size - 1) * -(-int(nbytes) // (world_size << 20))
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
