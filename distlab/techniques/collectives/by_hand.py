"""all_reduce, reduce_scatter and all_gather by hand.

    collective = Collective(group)
    collective.all_reduce(tensor)                              # returns when the sum stands in `tensor`
    pending = collective.all_reduce(tensor, async_op=True)     # the first round's messages are under way
    pending.wait()                                             # the other rounds

The sum is repeatable to the bit (its order is fixed) and the same to the bit on every rank (one rank sums a chunk, the
others get copies). Chunk r of a tensor is the r-th of torch's `tensor_split` along dim 0, so any length will do, even
0, and a tensor of rows is cut between rows.
"""

from collections.abc import Mapping
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from distlab.techniques.collectives import direct, ring, rooted, tree
from distlab.techniques.collectives.direct import add_up, all_gather, all_reduce
from distlab.techniques.collectives.phases import seen
from distlab.techniques.collectives.point_to_point import GroupMessage, Peers, Pending, Steps, split
from distlab.techniques.transport.tcp import Channel

# Which algorithm to take at which size: over gloo's messages, and over plain TCP.

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
#   reduce_scatter  server   0.26    0.6      1.4                                     0.05
#                   direct   0.40    0.7      1.1    3.5    11.2    43.6              0.05    0.3    3.9     17.5
#   all_gather      server   0.32    0.6      1.3                                     0.04
#                   direct   0.30    0.6      0.8    2.8    9.9     38.3              0.03    0.2    3.8     15.4
#
# Two ranks swap, one hop in place of two. Through rank 0 a reduce_scatter and an all_gather send more bytes than the
# least.
SERVER_OVER_TCP_BYTES = {"all_reduce": 512 << 10, "reduce_scatter": 64 << 10, "all_gather": 16 << 10}


def pick(op: str, nbytes: int, world_size: int) -> str:
    """The fastest of "server", "direct" and "backend" (gloo's own) for `op` on a tensor of `nbytes` in all."""
    several = world_size > 2
    if (world_size - 1) * nbytes <= SERVER_UP_TO_BYTES[op][several]:
        return "server"
    return "direct" if nbytes >= DIRECT_FROM_BYTES[op][several] else "backend"


def pick_over_tcp(op: str, nbytes: int, world_size: int) -> str:
    """The same over plain TCP, of "server" and "direct"."""
    return "server" if nbytes <= SERVER_OVER_TCP_BYTES[op] and world_size > 2 else "direct"


class Algorithm(Protocol):
    """What a file of an algorithm has; tensors are flat, or whole rows, and contiguous."""

    def all_reduce(self, peers: Peers, tensor: Tensor, /) -> Steps: ...

    def reduce_scatter(self, peers: Peers, tensor: Tensor, output: Tensor, /) -> Steps: ...

    def all_gather(self, peers: Peers, tensor: Tensor, /) -> Steps: ...


ALGORITHMS: Mapping[str, Algorithm] = {"ring": ring, "direct": direct, "tree": tree, "server": rooted}


class Collective:
    """The collectives of one group. It owns their scratch memory, which is kept for the next call.

    `algorithm` is ring, direct, tree, server, backend (what torch.distributed does), or auto: `pick` at each call.
    All ranks of the group must make the same calls in the same order. Tensors are contiguous; a wrong size, or one that
    is not, raises ValueError. A message that fails or times out raises RuntimeError naming its rank.
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
        return self._start("all_gather", whole, whole, async_op, given=chunk)

    def picked(self, op: str, whole: Tensor) -> str:
        """The algorithm that `op` on the tensor `whole` takes; `pick` knows gloo alone, and leaves NCCL to itself."""
        if self.peers.channel:
            auto = pick_over_tcp(op, whole.nbytes, self.peers.world_size)
        else:
            auto = "backend" if self.peers.batched else pick(op, whole.nbytes, self.peers.world_size)
        name = auto if self.algorithm == "auto" else self.algorithm
        uneven = whole.shape[0] % self.peers.world_size and op != "all_reduce"
        return "direct" if name == "backend" and uneven else name  # the backend's take even chunks alone

    def _check_chunk(self, name: str, chunk: Tensor, whole: Tensor) -> Tensor:
        mine = split(whole, self.peers.world_size)[self.peers.rank]
        if (chunk.numel(), chunk.dtype) != (mine.numel(), mine.dtype):
            raise ValueError(
                f"{name} has {chunk.numel()} elements of {chunk.dtype}; chunk {self.peers.rank} of"
                f" {self.peers.world_size} of {whole.numel()} elements of {whole.dtype} has {mine.numel()}"
            )
        return mine

    def _start(self, op: str, whole: Tensor, result: Tensor, async_op: bool, *, given: Tensor | None = None) -> Pending:
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
            steps = seen(op, ranks, whole if given is None else given, result, steps)
        pending = Pending(steps)
        if not async_op:
            pending.wait()
        return pending

    def _over_host(self, name: str, op: str, whole: Tensor, result: Tensor) -> Steps:
        """gloo sends no tensor that lives on a GPU."""
        host = whole.cpu()
        host_result = host if result is whole else torch.empty_like(result, device="cpu")
        yield from _by_hand(self.algorithms[name], op, host, host_result, self.peers)
        result.copy_(host_result)


def _by_hand(algorithm: Algorithm, op: str, whole: Tensor, result: Tensor, peers: Peers) -> Steps:
    if op == "reduce_scatter":
        return algorithm.reduce_scatter(peers, whole, result)
    return algorithm.all_reduce(peers, whole) if op == "all_reduce" else algorithm.all_gather(peers, whole)


def _backend(op: str, whole: Tensor, result: Tensor, peers: Peers) -> Steps:
    """What torch.distributed calls; the group's methods, since the functions around them were renamed in torch 2.13."""
    if op == "all_reduce":
        work = peers.group.allreduce([whole])
    elif op == "reduce_scatter":
        work = peers.group._reduce_scatter_base(result, whole.view(-1), dist.ReduceScatterOptions())
    else:
        work = peers.group._allgather_base(whole.view(-1), split(whole, peers.world_size)[peers.rank])
    yield GroupMessage(work, f"{op} of", dist.get_backend(peers.group))


def _copied(whole: Tensor, result: Tensor) -> Steps:
    """A world of one."""
    if whole.data_ptr() != result.data_ptr():
        result.copy_(whole.view_as(result))
    return
    yield


def _rows(tensor: Tensor) -> Tensor:
    """A contiguous tensor of at least one dim; a wrong one raises ValueError."""
    return _flat(tensor).view(tensor.shape or (1,))


def _flat(tensor: Tensor) -> Tensor:
    if not tensor.is_contiguous():
        raise ValueError(
            f"a tensor of shape {tuple(tensor.shape)}, strides {tensor.stride()}, is not contiguous: pass"
            " tensor.contiguous()"
        )
    return tensor.view(-1)


# Exchange: a reduce_scatter that is one all_to_all of the backend's and a sum; what is left is direct's.
#
# gloo posts and awaits all parts of an all_to_all in one work of its own thread, where direct.py has a work for each
# send and each receive, which are handed over one by one and waited for one by one. The bytes are the same,
# (N-1)/N·S, and the order of the sum too, so the result is direct's to the bit. Of 512 KiB between two ranks, two
# others at it too, it takes 1.7 ms where direct takes 3.5. The price is scratch memory for this
# rank's own part, S in place of (N-1)/N·S.

__all__ = ["all_gather", "all_reduce", "reduce_scatter"]


def reduce_scatter(peers: Peers, tensor: Tensor, output: Tensor) -> Steps:
    """Leave the sum of all ranks' chunk `rank` of `tensor` in `output`, which may be that chunk itself."""
    given, numel = [chunk.numel() for chunk in split(tensor, peers.world_size)], output.numel()
    with peers.scratch(numel * peers.world_size, output) as scratch:
        taken = [numel] * peers.world_size
        work = peers.group.alltoall_base(scratch, tensor.view(-1), taken, given)
        yield GroupMessage(work, "reduce_scatter of", dist.get_backend(peers.group))
        parts = scratch.split(taken)
        ring = [peers.after(-distance) for distance in range(peers.world_size)]
        add_up([parts[peer] for peer in ring], output)
