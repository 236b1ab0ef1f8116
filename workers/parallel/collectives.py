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

from workers.parallel import direct, pairs, ring, rooted, tree
from workers.parallel.channel import Channel
from workers.parallel.peers import GroupMessage, Peers, Pending, Steps, split
from workers.parallel.picking import pick, pick_over_tcp


class Algorithm(Protocol):
    """What a file of an algorithm has; tensors are flat, or whole rows, and contiguous."""

    def all_reduce(self, peers: Peers, tensor: Tensor, /) -> Steps: ...

    def reduce_scatter(self, peers: Peers, tensor: Tensor, output: Tensor, /) -> Steps: ...

    def all_gather(self, peers: Peers, tensor: Tensor, /) -> Steps: ...


ALGORITHMS: Mapping[str, Algorithm] = {"ring": ring, "direct": direct, "tree": tree, "server": rooted}


# Over plain TCP, where a message costs little, and the backend is not what is wanted.
OVER_TCP: Mapping[str, Algorithm] = {**ALGORITHMS, "pairs": pairs}


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
        algorithms = algorithms or (OVER_TCP if carrier else ALGORITHMS)
        if algorithm not in (*algorithms, "backend", "auto"):
            raise ValueError(f"algorithm {algorithm!r} is not one of {', '.join(algorithms)}, backend, auto")
        self.peers = Peers(group, carrier)
        self._blocking = self.peers.blocking()
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
        return self._start("all_gather", whole, whole, async_op)

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

    def _start(self, op: str, whole: Tensor, result: Tensor, async_op: bool) -> Pending:
        name, peers = self.picked(op, whole), self.peers if async_op else self._blocking
        if peers.world_size == 1:
            steps = _copied(whole, result)
        elif name == "backend":
            steps = _backend(op, whole, result, peers)
        elif whole.is_cuda and not peers.batched:
            steps = self._over_host(name, op, whole, result)
        else:
            steps = _by_hand(self.algorithms[name], op, whole, result, peers)
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
