"""Differentiable communication: every primitive as a linear map between ranks, and its transpose.

`torch.distributed` records nothing for autograd: a loss after `dist.all_gather` sends no gradient back. These functions
do; each docstring names forward and backward. The right backward depends on the loss:

  own         each rank has its own loss, and their sum is minimised, as in data-parallel training. The backward is
              then the transpose of the forward, for every primitive.
  replicated  all ranks compute the same loss from the same tensor, as after Megatron's g. That loss counts once, and
              every rank already has its full gradient: a sum over the ranks would count it N times.

The two differ only where the forward leaves the same tensor on every rank: broadcast, all_gather, all_reduce. Elsewhere
each rank has a different part of the loss, and the transpose serves both. Source: Shoeybi et al., "Megatron-LM"
(2019), section 3, for f and g; Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models"
(2022), section 4.2, for all_gather and reduce_scatter as each other's transpose.

Each function takes a tensor on every rank and returns a new one; nothing is changed in place. "Rows" are tensors [N,
...] with one row per rank of the group. Ranks that receive nothing (all but the root in a gather) return an empty
tensor, so that every rank can call `backward` on the sum.
"""

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from distlab.techniques.collectives.by_hand import Collective

Loss = Literal["own", "replicated"]
Map = Callable[[Tensor], Tensor]


class Linear(torch.autograd.Function):
    """Forward: `forward_map(x)`, a new tensor. Backward: `backward_map(gradient)`, of the shape of x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_map: Map, backward_map: Map) -> Tensor:
        """`forward_map(x)`."""
        ctx.backward_map = backward_map
        return forward_map(x.detach())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        """Return `backward_map` of the one gradient."""
        return ctx.backward_map(gradients[0].contiguous()), None, None


def linear(x: Tensor, forward_map: Map, backward_map: Map) -> Tensor:
    """Return `forward_map(x)`, with `backward_map` in the backward pass."""
    result: Tensor = Linear.apply(x, forward_map, backward_map)  # type: ignore[no-untyped-call]
    return result


def on_root(x: Tensor, group: dist.ProcessGroup, root: int, shape: torch.Size) -> Tensor:
    """Return x on the root, and zeros of `shape` elsewhere: only the root's input affected the output."""
    return x if group.rank() == root else x.new_zeros(shape)


def send(x: Tensor, group: dist.ProcessGroup, source: int, destination: int) -> Tensor:
    """Forward: move x of `source` to `destination`; x has the same shape on both. Backward: send the gradient back."""
    rank = group.rank()

    def forward_map(x: Tensor) -> Tensor:
        if rank == destination and source != destination:
            x = torch.empty_like(x)
            group.recv([x], source, 0).wait()
        elif rank == source and source != destination:
            group.send([x.contiguous()], destination, 0).wait()
        return x.clone() if rank == destination else x.new_empty(0)

    def backward_map(gradient: Tensor) -> Tensor:
        sent = on_root(gradient, group, destination, x.shape)
        return on_root(send(sent, group, destination, source), group, source, x.shape)

    return linear(x, forward_map, backward_map)


def broadcast(x: Tensor, group: dist.ProcessGroup, root: int = 0, loss: Loss = "own") -> Tensor:
    """Forward: the root's x, everywhere. Backward: own, reduce to the root; replicated, the root's own gradient."""

    def forward_map(x: Tensor) -> Tensor:
        copied = x.clone()
        dist.broadcast(copied, group=group, group_src=root)
        return copied

    def backward_map(gradient: Tensor) -> Tensor:
        total = reduce(gradient, group, root) if loss == "own" else gradient
        return on_root(total, group, root, x.shape)

    return linear(x, forward_map, backward_map)


def scatter(rows: Tensor, group: dist.ProcessGroup, root: int = 0) -> Tensor:
    """Forward: row r of the root's `rows`, on rank r. Backward: gather."""

    def forward_map(rows: Tensor) -> Tensor:
        row = torch.empty_like(rows[0])
        dist.scatter(row, list(rows.unbind()) if group.rank() == root else None, group=group, group_src=root)
        return row

    def backward_map(gradient: Tensor) -> Tensor:
        return on_root(gather(gradient, group, root), group, root, rows.shape)

    return linear(rows, forward_map, backward_map)


def gather(x: Tensor, group: dist.ProcessGroup, root: int = 0) -> Tensor:
    """Forward: everyone's x as rows, on the root. Backward: scatter."""

    def forward_map(x: Tensor) -> Tensor:
        rows = [torch.empty_like(x) for _ in range(group.size())] if group.rank() == root else None
        dist.gather(x.contiguous(), rows, group=group, group_dst=root)
        return torch.stack(rows) if rows is not None else x.new_empty(0)

    def backward_map(gradient: Tensor) -> Tensor:
        return scatter(on_root(gradient, group, root, torch.Size([group.size(), *x.shape])), group, root)

    return linear(x, forward_map, backward_map)


def reduce(x: Tensor, group: dist.ProcessGroup, root: int = 0) -> Tensor:
    """Forward: the sum of everyone's x, on the root. Backward: broadcast."""

    def forward_map(x: Tensor) -> Tensor:
        total = x.clone()
        dist.reduce(total, group=group, group_dst=root)
        return total if group.rank() == root else x.new_empty(0)

    def backward_map(gradient: Tensor) -> Tensor:
        return broadcast(on_root(gradient, group, root, x.shape), group, root)

    return linear(x, forward_map, backward_map)


def all_gather(x: Tensor, group: dist.ProcessGroup, loss: Loss = "own") -> Tensor:
    """Forward: everyone's x as rows, everywhere. Backward: own, reduce_scatter; replicated, this rank's row."""

    def forward_map(x: Tensor) -> Tensor:
        rows = [torch.empty_like(x) for _ in range(group.size())]
        dist.all_gather(rows, x.contiguous(), group=group)
        return torch.stack(rows)

    def backward_map(gradient: Tensor) -> Tensor:
        return reduce_scatter(gradient, group) if loss == "own" else gradient[group.rank()].clone()

    return linear(x, forward_map, backward_map)


def all_reduce(x: Tensor, group: dist.ProcessGroup, loss: Loss = "own") -> Tensor:
    """Forward: the sum of everyone's x, everywhere. Backward: own, all_reduce; replicated, identity (Megatron's g)."""

    def forward_map(x: Tensor) -> Tensor:
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    return linear(x, forward_map, forward_map if loss == "own" else lambda gradient: gradient)


def copy(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Forward: identity, on a tensor that all ranks have. Backward: all_reduce, since every rank used it (Megatron's
    f)."""
    return linear(x, Tensor.clone, lambda gradient: all_reduce(gradient, group))


def all_to_all(rows: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Forward: row r to rank r, from everyone to everyone. Backward: all_to_all, each row the way back."""

    def swapped(rows: Tensor) -> Tensor:
        received = [torch.empty_like(row) for row in rows]
        dist.all_to_all(received, [row.contiguous() for row in rows], group=group)
        return torch.stack(received)

    return linear(rows, swapped, swapped)


def reduce_scatter(rows: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Forward: the sum of everyone's row r, on rank r. Backward: all_gather."""

    def forward_map(rows: Tensor) -> Tensor:
        row = torch.empty_like(rows[0])
        Collective(group).reduce_scatter(row, rows.contiguous())
        return row

    return linear(rows, forward_map, lambda gradient: all_gather(gradient, group))
