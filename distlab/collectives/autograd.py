"""Communication with a backward pass: every primitive as a linear map between ranks, and its transpose.

`torch.distributed` records nothing for autograd: a loss behind `dist.all_gather` sends no gradient back. Each function
here does, and its docstring names forward and backward. Which backward is right depends on what the loss is:

  own         each rank has a loss of its own, and what is minimised is their sum, as in data parallel training. The
              backward is then the transpose of the forward, for every primitive.
  replicated  all ranks compute the same loss from the same tensor, as behind Megatron's g. That loss counts once, and
              every rank holds its whole gradient already: to sum it over the ranks would count it N times.

The two differ only where the forward leaves the same tensor on every rank: broadcast, all_gather, all_reduce. Elsewhere
the parts of a loss differ from rank to rank, and one transpose serves both. Source: Shoeybi et al., "Megatron-LM"
(2019), section 3, for f and g; Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models"
(2022), section 4.2, for all_gather and reduce_scatter as each other's transpose.

Where a rank gets nothing (a gather's other ranks) its output is empty, so that every rank can call `backward` on the
sum.
"""

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from distlab.collectives import functional

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
        """`backward_map` of the one gradient."""
        return ctx.backward_map(gradients[0].contiguous()), None, None


def linear(x: Tensor, forward_map: Map, backward_map: Map) -> Tensor:
    """`forward_map(x)`, with `backward_map` in its backward pass."""
    result: Tensor = Linear.apply(x, forward_map, backward_map)  # type: ignore[no-untyped-call]
    return result


def on_root(x: Tensor, group: dist.ProcessGroup, root: int, shape: torch.Size) -> Tensor:
    """x on the root, zeros of `shape` elsewhere: only the root's input had a say."""
    return x if group.rank() == root else x.new_zeros(shape)


def send(x: Tensor, group: dist.ProcessGroup, source: int, destination: int) -> Tensor:
    """Forward: x of `source`, on `destination`. Backward: send the gradient the other way."""

    def backward_map(gradient: Tensor) -> Tensor:
        sent = on_root(gradient, group, destination, x.shape)
        return on_root(functional.send(sent, group, destination, source), group, source, x.shape)

    return linear(x, lambda x: functional.send(x, group, source, destination), backward_map)


def broadcast(x: Tensor, group: dist.ProcessGroup, root: int = 0, loss: Loss = "own") -> Tensor:
    """Forward: the root's x, everywhere. Backward: own, reduce to the root; replicated, the root's own gradient."""

    def backward_map(gradient: Tensor) -> Tensor:
        total = functional.reduce(gradient, group, root) if loss == "own" else gradient
        return on_root(total, group, root, x.shape)

    return linear(x, lambda x: functional.broadcast(x, group, root), backward_map)


def scatter(rows: Tensor, group: dist.ProcessGroup, root: int = 0) -> Tensor:
    """Forward: row r of the root's `rows`, on rank r. Backward: gather."""

    def backward_map(gradient: Tensor) -> Tensor:
        return on_root(functional.gather(gradient, group, root), group, root, rows.shape)

    return linear(rows, lambda rows: functional.scatter(rows, group, root), backward_map)


def gather(x: Tensor, group: dist.ProcessGroup, root: int = 0) -> Tensor:
    """Forward: everyone's x as rows, on the root. Backward: scatter."""

    def backward_map(gradient: Tensor) -> Tensor:
        return functional.scatter(on_root(gradient, group, root, torch.Size([group.size(), *x.shape])), group, root)

    return linear(x, lambda x: functional.gather(x, group, root), backward_map)


def reduce(x: Tensor, group: dist.ProcessGroup, root: int = 0) -> Tensor:
    """Forward: the sum of everyone's x, on the root. Backward: broadcast."""

    def backward_map(gradient: Tensor) -> Tensor:
        return functional.broadcast(on_root(gradient, group, root, x.shape), group, root)

    return linear(x, lambda x: functional.reduce(x, group, root), backward_map)


def all_gather(x: Tensor, group: dist.ProcessGroup, loss: Loss = "own") -> Tensor:
    """Forward: everyone's x as rows, everywhere. Backward: own, reduce_scatter; replicated, this rank's row."""

    def backward_map(gradient: Tensor) -> Tensor:
        return functional.reduce_scatter(gradient, group) if loss == "own" else gradient[group.rank()].clone()

    return linear(x, lambda x: functional.all_gather(x, group), backward_map)


def all_reduce(x: Tensor, group: dist.ProcessGroup, loss: Loss = "own") -> Tensor:
    """Forward: the sum of everyone's x, everywhere. Backward: own, all_reduce; replicated, identity (Megatron's g)."""

    def backward_map(gradient: Tensor) -> Tensor:
        return functional.all_reduce(gradient, group) if loss == "own" else gradient

    return linear(x, lambda x: functional.all_reduce(x, group), backward_map)


def copy(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Forward: identity, on a tensor that all ranks hold. Backward: all_reduce, as every rank used it (Megatron's
    f)."""
    return linear(x, Tensor.clone, lambda gradient: functional.all_reduce(gradient, group))


def all_to_all(rows: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Forward: row r to rank r, from everyone to everyone. Backward: all_to_all, each row the way back."""
    return linear(
        rows, lambda rows: functional.all_to_all(rows, group), lambda gradient: functional.all_to_all(gradient, group)
    )


def reduce_scatter(rows: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Forward: the sum of everyone's row r, on rank r. Backward: all_gather."""
    return linear(
        rows,
        lambda rows: functional.reduce_scatter(rows, group),
        lambda gradient: functional.all_gather(gradient, group),
    )
