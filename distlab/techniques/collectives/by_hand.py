"""all_reduce, reduce_scatter and all_gather by hand.

    collective = Collective(group)
    collective.all_reduce(tensor)                              # returns when `tensor` has the sum
    pending = collective.all_reduce(tensor, async_op=True)     # starts the messages of the first round
    pending.wait()                                             # runs the other rounds

Results are deterministic (the order of summation is fixed) and equal to the bit on every rank (one rank sums a chunk,
the others get copies). Chunk r of a tensor is the r-th of torch's `tensor_split` along dim 0, so any length works, even
0, and a tensor of rows is cut between rows.
"""

from collections.abc import Mapping
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from distlab.techniques.collectives import direct, ring, rooted, tree
from distlab.techniques.collectives.direct import add_up, all_gather, all_reduce
from distlab.techniques.collectives.phases import observed_steps
from distlab.techniques.collectives.point_to_point import GroupMessage, Peers, Pending, Steps, split
from distlab.techniques.transport.tcp import Channel

# The algorithm by size of the tensor: over gloo's messages, and over plain TCP.

# Time of gloo's own call divided by ours, medians of interleaved rounds, on two cores: 4 ranks idle, in brackets 2
# ranks on busy cores. The thresholds come from `python -m benchmarks.collectives`.
#
#                            64 KiB      256 KiB     1 MiB       4 MiB       16 MiB      64 MiB
#   all_reduce      server   4.9  (9)    2.8  (4)    1.6  (3)    1.0  (.9)   0.8  (0.8)  0.7
#                   direct   1.0         0.8         0.8         0.9  (.6)   0.8  (0.8)  1.0  (1.0)
#   reduce_scatter  server   3.0  (0.8)  3.6  (0.9)  2.0  (0.5)  1.8  (1.0)  1.4  (1.3)  1.6
#                   direct   0.9  (0.9)  1.6  (0.9)  1.5  (0.4)  1.8  (1.4)  2.1  (1.9)  2.6  (4)
#   all_gather      server   2.8         3.1         1.6         1.2         1.1         1.7
#                   direct   1.1  (0.1)  0.9  (0.4)  1.2  (.5)   1.4  (0.8)  1.5  (1.5)  2.5  (3.5)
#
# Where ranks share cores each message costs a context switch, and the server needs 2(N-1) messages in total, the others
# 2N(N-1); but its one link carries (N-1)·S. gloo's all_reduce of large tensors already saturates the link.
NEVER = 1 << 62
SERVER_UP_TO_BYTES = {
    "all_reduce": (1 << 20, 3 << 20),
    "reduce_scatter": (0, 3 << 20),
    "all_gather": (0, 3 << 20),
}  # (N-1)·S
DIRECT_FROM_BYTES = {"all_reduce": (NEVER, NEVER), "reduce_scatter": (4 << 20, 0), "all_gather": (16 << 20, 2 << 20)}


# Over plain TCP, in ms of `Collective(group, algorithm, carrier=channel)`, medians of 15 interleaved rounds, two cores:
#
#                   4 ranks  64 KiB  512 KiB  1 MiB  4 MiB  16 MiB  64 MiB   2 ranks  64 KiB  1 MiB  16 MiB  64 MiB
#   all_reduce      server   0.20    0.7      1.7                                     0.03
#                   direct   0.69    1.1      1.6    5.7    20.6    84.6              0.04    0.4    7.6     32.6
#   reduce_scatter  server   0.26    0.6      1.4                                     0.05
#                   direct   0.40    0.7      1.1    3.5    11.2    43.6              0.05    0.3    3.9     17.5
#   all_gather      server   0.32    0.6      1.3                                     0.04
#                   direct   0.30    0.6      0.8    2.8    9.9     38.3              0.03    0.2    3.8     15.4
#
# Two ranks exchange directly, one hop instead of two. Through rank 0 a reduce_scatter or all_gather sends more bytes
# than necessary.
SERVER_OVER_TCP_BYTES = {"all_reduce": 512 << 10, "reduce_scatter": 64 << 10, "all_gather": 16 << 10}


def pick(op: str, nbytes: int, world_size: int) -> str:
    """Return the fastest of "server", "direct" and "backend" (gloo's own) for `op` on a tensor of `nbytes` in total."""
    several = world_size > 2
    if (world_size - 1) * nbytes <= SERVER_UP_TO_BYTES[op][several]:
        return "server"
    return "direct" if nbytes >= DIRECT_FROM_BYTES[op][several] else "backend"


def pick_over_tcp(op: str, nbytes: int, world_size: int) -> str:
    """Return the faster of "server" and "direct" over plain TCP."""
    return "server" if nbytes <= SERVER_OVER_TCP_BYTES[op] and world_size > 2 else "direct"


class Algorithm(Protocol):
    """The functions of an algorithm's file; tensors are flat, or whole rows, and contiguous."""

    def all_reduce(self, peers: Peers, tensor: Tensor, /) -> Steps: ...

    def reduce_scatter(self, peers: Peers, tensor: Tensor, output: Tensor, /) -> Steps: ...

    def all_gather(self, peers: Peers, tensor: Tensor, /) -> Steps: ...


ALGORITHMS: Mapping[str, Algorithm] = {"ring": ring, "direct": direct, "tree": tree, "server": rooted}


class Collective:
    """The collectives of one group. It owns their scratch memory, which is reused by the next call.

    `algorithm` is ring, direct, tree, server, backend (torch.distributed's own), or auto: `pick` at each call. All
    ranks of the group must make the same calls in the same order. A tensor of wrong size, or not contiguous, raises
    ValueError. A message that fails or times out raises RuntimeError with the peer's rank.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        algorithm: str = "auto",
        algorithms: Mapping[str, Algorithm] | None = None,
        carrier: Channel | None = None,
    ) -> None:
        algorithms = algorithms or ALGORITHMS
        if algorithm not in (*algorithms, "backend", "auto"):
            raise ValueError(f"algorithm {algorithm!r} is not one of {', '.join(algorithms)}, backend, auto")
        self.peers = Peers(group, carrier)
        self.algorithm, self.algorithms = algorithm, algorithms

    def all_reduce(self, tensor: Tensor, out: Tensor | None = None, *, async_op: bool = False) -> Pending:
        """Sum `tensor` over all ranks, in place, or into `out` of the same size."""
        if out is not None:
            tensor = out.copy_(tensor)
        whole = _flat(tensor)
        return self._start("all_reduce", whole, whole, async_op)

    def reduce_scatter(self, output: Tensor, tensor: Tensor, *, async_op: bool = False) -> Pending:
        """Leave the sum of all ranks' chunk `rank` of `tensor` in `output`, which may be that chunk itself."""
        whole, chunk = _rows(tensor), _flat(output)
        self._check_chunk("output", chunk, whole)
        return self._start("reduce_scatter", whole, chunk, async_op)

    def all_gather(self, output: Tensor, tensor: Tensor, *, async_op: bool = False) -> Pending:
        """Fill `output` with all ranks' `tensor`, this rank's being chunk `rank` of it (and may be that chunk
        itself)."""
        whole, chunk = _rows(output), _flat(tensor)
        mine = self._check_chunk("tensor", chunk, whole)
        if mine.data_ptr() != chunk.data_ptr():
            mine.copy_(chunk)
        return self._start("all_gather", whole, whole, async_op, source=chunk)

    def picked(self, op: str, whole: Tensor) -> str:
        """Return the algorithm of `op` on the full tensor `whole`; `pick` knows gloo only, so NCCL keeps its own."""
        if self.peers.channel:
            auto = pick_over_tcp(op, whole.nbytes, self.peers.world_size)
        else:
            auto = "backend" if self.peers.batched else pick(op, whole.nbytes, self.peers.world_size)
        name = auto if self.algorithm == "auto" else self.algorithm
        uneven = whole.shape[0] % self.peers.world_size and op != "all_reduce"
        return "direct" if name == "backend" and uneven else name  # the backend supports even chunks only

    def _check_chunk(self, name: str, chunk: Tensor, whole: Tensor) -> Tensor:
        mine = split(whole, self.peers.world_size)[self.peers.rank]
        if (chunk.numel(), chunk.dtype) != (mine.numel(), mine.dtype):
            raise ValueError(
                f"{name} has {chunk.numel()} elements of {chunk.dtype}; chunk {self.peers.rank} of"
                f" {self.peers.world_size} of {whole.numel()} elements of {whole.dtype} has {mine.numel()}"
            )
        return mine

    def _start(
        self, op: str, whole: Tensor, result: Tensor, async_op: bool, *, source: Tensor | None = None
    ) -> Pending:
        name, peers = self.picked(op, whole), self.peers
        if peers.world_size == 1:
            steps = _copied(whole, result)
        elif name == "backend":
            steps = _backend(op, whole, result, peers)
        elif whole.is_cuda and not peers.batched:
            steps = self._over_host(name, op, whole, result)
        else:
            steps = _by_hand(self.algorithms[name], op, whole, result, peers)
        if peers.world_size > 1:
            ranks = dist.get_process_group_ranks(peers.group)
            steps = observed_steps(op, ranks, whole if source is None else source, result, steps)
        pending = Pending(steps)
        if not async_op:
            pending.wait()
        return pending

    def _over_host(self, name: str, op: str, whole: Tensor, result: Tensor) -> Steps:
        """Run `op` through host memory, since gloo cannot send GPU tensors."""
        host = whole.cpu()
        host_result = host if result is whole else torch.empty_like(result, device="cpu")
        yield from _by_hand(self.algorithms[name], op, host, host_result, self.peers)
        result.copy_(host_result)


def _by_hand(algorithm: Algorithm, op: str, whole: Tensor, result: Tensor, peers: Peers) -> Steps:
    if op == "reduce_scatter":
        return algorithm.reduce_scatter(peers, whole, result)
    return algorithm.all_reduce(peers, whole) if op == "all_reduce" else algorithm.all_gather(peers, whole)


def _backend(op: str, whole: Tensor, result: Tensor, peers: Peers) -> Steps:
    """Call torch.distributed's own; by the group's methods, since torch 2.13 renamed the functions around them."""
    if op == "all_reduce":
        work = peers.group.allreduce([whole])
    elif op == "reduce_scatter":
        work = peers.group._reduce_scatter_base(result, whole.view(-1), dist.ReduceScatterOptions())
    else:
        work = peers.group._allgather_base(whole.view(-1), split(whole, peers.world_size)[peers.rank])
    yield GroupMessage(work, f"{op} of", dist.get_backend(peers.group))


def _copied(whole: Tensor, result: Tensor) -> Steps:
    """Return the tensor itself, in a world of one."""
    if whole.data_ptr() != result.data_ptr():
        result.copy_(whole.view_as(result))
    return
    yield


def _rows(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor of at least one dim; raises ValueError if it is not contiguous."""
    return _flat(tensor).view(tensor.shape or (1,))


def _flat(tensor: Tensor) -> Tensor:
    if not tensor.is_contiguous():
        raise ValueError(
            f"a tensor of shape {tuple(tensor.shape)}, strides {tensor.stride()}, is not contiguous: pass"
            " tensor.contiguous()"
        )
    return tensor.view(-1)


# Exchange: a reduce_scatter made of one all_to_all of the backend and a sum; everything else is direct's.
#
# gloo runs all parts of an all_to_all as one work on its own thread, where direct.py has one work per send and receive,
# each started and awaited separately. The bytes are the same, (N-1)/N·S, and so is the order of the sum, so the results
# are equal to the bit. For 512 KiB between two ranks, with two other ranks on the same cores, it takes 1.7 ms instead
# of 3.5. The price is scratch memory for this rank's own part, S instead of (N-1)/N·S.

__all__ = ["all_gather", "all_reduce", "reduce_scatter"]


def reduce_scatter(peers: Peers, tensor: Tensor, output: Tensor) -> Steps:
    """Leave the sum of all ranks' chunk `rank` of `tensor` in `output`, which may be that chunk itself."""
    send_sizes, numel = [chunk.numel() for chunk in split(tensor, peers.world_size)], output.numel()
    with peers.scratch(numel * peers.world_size, output) as scratch:
        receive_sizes = [numel] * peers.world_size
        work = peers.group.alltoall_base(scratch, tensor.view(-1), receive_sizes, send_sizes)
        yield GroupMessage(work, "reduce_scatter of", dist.get_backend(peers.group))
        parts = scratch.split(receive_sizes)
        ring = [peers.after(-distance) for distance in range(peers.world_size)]
        add_up([parts[peer] for peer in ring], output)
