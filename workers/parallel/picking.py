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


# Over plain TCP, ms by `Collective(group, algorithm, carrier=channel)`, medians of 15 interleaved rounds on two cores:
#
#                   4 ranks  64 KiB  512 KiB  1 MiB  4 MiB  16 MiB  64 MiB   2 ranks  64 KiB  1 MiB  16 MiB  64 MiB
#   all_reduce      server   0.20    0.7      1.7                                     0.03
#                   direct   0.69    1.1      1.6    5.7    20.6    84.6              0.04    0.4    7.6     32.6
#                   pairs    0.69    1.2      2.1    5.9    20.5    70.7              0.06    0.8    9.5     41.2
#   reduce_scatter  server   0.26    0.6      1.4                                     0.05
#                   direct   0.40    0.7      1.1    3.5    11.2    43.6              0.05    0.3    3.9     17.5
#                   pairs    0.51    0.7      1.2    3.8    12.0    39.6              0.05    0.5    6.0     24.7
#   all_gather      server   0.32    0.6      1.3                                     0.04
#                   direct   0.30    0.6      0.8    2.8    9.9     38.3              0.03    0.2    3.8     15.4
#                   pairs    0.33    0.6      1.0    3.2    11.1    36.3              0.04    0.4    5.3     22.0
#
# Two ranks swap, one hop in place of two; but beside a backward pass buckets of 14 and 25 MiB cost less in blocks than
# with room for all that comes, 0.92 of DDP's step for 0.97 (`python -m benchmarks.over_tcp`). With an odd number one
# rank of each round of pairs has nobody: three ranks take 0.7 of the time straight. Through rank 0 a reduce_scatter and
# an all_gather send more bytes than the least.
SERVER_OVER_TCP_BYTES = {"all_reduce": 512 << 10, "reduce_scatter": 64 << 10, "all_gather": 16 << 10}
PAIRS_ABOVE_BYTES = {"all_reduce": 4 << 20, "reduce_scatter": 16 << 20, "all_gather": 16 << 20}


def pick(op: str, nbytes: int, world_size: int) -> str:
    """The fastest of "server", "direct" and "backend" (gloo's own) for `op` on a tensor of `nbytes` in all."""
    several = world_size > 2
    if (world_size - 1) * nbytes <= SERVER_UP_TO_BYTES[op][several]:
        return "server"
    return "direct" if nbytes >= DIRECT_FROM_BYTES[op][several] else "backend"


def pick_over_tcp(op: str, nbytes: int, world_size: int) -> str:
    """The same over plain TCP, of "server", "direct" and "pairs"."""
    swapped = world_size == 2 and op != "all_reduce"
    if nbytes > PAIRS_ABOVE_BYTES[op] and world_size % 2 == 0 and not swapped:
        return "pairs"
    return "server" if nbytes <= SERVER_OVER_TCP_BYTES[op] and world_size > 2 else "direct"
