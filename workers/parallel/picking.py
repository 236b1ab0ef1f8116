"""Which algorithm to take at which size: over gloo's messages, and over plain TCP."""

# Speed against gloo's own, medians of interleaved rounds, on two cores: 4 ranks idle, in brackets 2 ranks on busy
# cores. `python -m benchmarks.collectives` prints the table that decides.
#
#                            64 KiB      256 KiB     1 MiB       4 MiB       16 MiB      64 MiB
#   all_reduce      server   4.9  (9)    2.8  (4)    1.6  (3)    1.0  (.9)   0.8  (0.8)  0.7
#                   direct   1.0         0.8         0.8         0.9  (.6)   0.8  (0.8)  1.0  (1.0)
#   reduce_scatter  server   3.0  (0.8)  3.6  (0.9)  2.0  (0.5)  1.8  (1.0)  1.4  (1.3)  1.6
#                   direct   0.9  (0.9)  1.6  (0.9)  1.5  (0.4)  1.8  (1.4)  2.1  (1.9)  2.6  (4)
#   all_gather      server   2.8         3.1         1.6         1.2         1.1         1.7
#                   direct   1.1  (0.1)  0.9  (0.4)  1.2  (.5)   1.4  (0.8)  1.5  (1.5)  2.5  (3.5)
#
# Where ranks share cores each message costs a change of context, and the server needs 2(N-1) in all where others need
# 2N(N-1); what it can take is bounded by its one link, (N-1)·S. gloo's all_reduce of large tensors is at the link's
# limit.
NEVER = 1 << 62
SERVER_UP_TO_BYTES = {
    "all_reduce": (1 << 20, 3 << 20),
    "reduce_scatter": (0, 3 << 20),
    "all_gather": (0, 3 << 20),
}  # (N-1)·S
DIRECT_FROM_BYTES = {"all_reduce": (NEVER, NEVER), "reduce_scatter": (4 << 20, 0), "all_gather": (16 << 20, 2 << 20)}


# Over plain TCP, `python -m benchmarks.transport`: so many bytes go to rank 0 and back. Of 64 B four ranks
# have a reduce_scatter in 0.41 ms so and an all_gather in 0.37, straight from rank to rank in 0.64 and 0.50; of more
# than 64 KiB fewer bytes are worth more messages.
PAIRS_ABOVE_BYTES = 256 << 10
SERVER_OVER_TCP_BYTES = {"all_reduce": PAIRS_ABOVE_BYTES, "reduce_scatter": 64 << 10, "all_gather": 64 << 10}


def pick(op: str, nbytes: int, world_size: int) -> str:
    """The fastest of "server", "direct" and "backend" (gloo's own) for `op` on a tensor of `nbytes` in all."""
    several = world_size > 2
    if (world_size - 1) * nbytes <= SERVER_UP_TO_BYTES[op][several]:
        return "server"
    return "direct" if nbytes >= DIRECT_FROM_BYTES[op][several] else "backend"


def pick_over_tcp(op: str, nbytes: int) -> str:
    """The same over plain TCP, of "server", "direct" and "pairs"."""
    if nbytes <= SERVER_OVER_TCP_BYTES[op]:
        return "server"
    return "pairs" if nbytes > PAIRS_ABOVE_BYTES else "direct"
