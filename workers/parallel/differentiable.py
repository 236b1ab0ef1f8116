"""Communication with a backward pass: every primitive as a linear map between ranks, and its transpose.

`torch.distributed` records nothing for autograd: a loss behind `dist.all_gather` sends no gradient back. Each function here
does, and its docstring names forward and backward. Which backward is right depends on what the loss is:

  own         each rank has a loss of its own, and what is minimised is their sum, as in data parallel training. The
              backward is then the transpose of the forward, for every primitive.
  replicated  all ranks compute the same loss from the same tensor, as behind Megatron's g. That loss counts once, and every
              rank holds its whole gradient already: to sum it over the ranks would count it N times.

The two differ only where the forward leaves the same tensor on every rank: broadcast, all_gather, all_reduce. Elsewhere the
parts of a loss differ from rank to rank, and one transpose serves both. Source: Shoeybi et al., "Megatron-LM" (2019),
section 3, for f and g; Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (2022), section
4.2, for all_gather and reduce_scatter as each other's transpose.

Where a rank gets nothing (a gather's other ranks) its output is empty, so that every rank can call `backward` on the sum.
"""

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

Loss = Literal["own", "replicated"]
Map = Callable[[Tensor], Tensor]


class Linear(torch.autograd.Function):
    """Forward: `forward_map(x)`. Backward: `backward_map(gradient)`, which must have the shape of x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_map: Map, backward_map: Map) -> Tensor:
        ctx.backward_map = backward_map
        return forward_map(x.detach().contiguous())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return ctx.backward_map(gradients[0].contiguous()), None, None


def apply(x: Tensor, forward_map: Map, backward_map: Map) -> Tensor:
    """`forward_map(x)`, with `backward_map` in its backward pass."""
    result: Tensor = Linear.apply(x, forward_map, backward_map)  # type: ignore[no-untyped-call]
    return result


def send(x: Tensor, group: dist.ProcessGroup, source: int, destination: int) -> Tensor:
    """Forward: x of `source` to `destination`, which returns it; all others return an empty tensor. Backward: the way back."""
    return apply(x, lambda x: moved(x, x, group, source, destination), lambda gradient: moved(gradient, x, group, destination, source, 0))


def broadcast(x: Tensor, group: dist.ProcessGroup, root: int = 0, loss: Loss = "own") -> Tensor:
    """Forward: the root's x on every rank. Backward: own, the sum of all gradients to the root; replicated, the root's own."""
    return apply(
        x,
        lambda x: copied_from(x, group, root),
        lambda gradient: only_on(root, group, summed(gradient, group) if loss == "own" else gradient),
    )


def scatter(x: Tensor, group: dist.ProcessGroup, root: int = 0) -> Tensor:
    """Forward: x [N, ...] of the root, row r to rank r. Backward: gather, each rank's gradient to its row."""
    return apply(x, lambda x: copied_from(x, group, root)[group.rank()].clone(), lambda gradient: only_on(root, group, stacked(gradient, group)))


def gather(x: Tensor, group: dist.ProcessGroup, root: int = 0) -> Tensor:
    """Forward: everyone's x as [N, ...] on the root, empty elsewhere. Backward: scatter, row r of the root's gradient to rank r."""

    def backward_map(gradient: Tensor) -> Tensor:
        rows = gradient if group.rank() == root else x.new_zeros((group.size(), *x.shape))
        return copied_from(rows, group, root)[group.rank()].clone()

    return apply(x, lambda x: emptied_but_on(root, group, stacked(x, group)), backward_map)


def reduce(x: Tensor, group: dist.ProcessGroup, root: int = 0) -> Tensor:
    """Forward: the sum of everyone's x on the root, empty elsewhere. Backward: broadcast of the root's gradient."""
    return apply(
        x,
        lambda x: emptied_but_on(root, group, summed(x, group)),
        lambda gradient: copied_from(gradient if group.rank() == root else torch.zeros_like(x), group, root),
    )


def all_gather(x: Tensor, group: dist.ProcessGroup, loss: Loss = "own") -> Tensor:
    """Forward: everyone's x as [N, ...] on every rank. Backward: own, reduce_scatter; replicated, this rank's slice."""
    return apply(
        x,
        lambda x: stacked(x, group),
        lambda gradient: (summed(gradient, group) if loss == "own" else gradient)[group.rank()].clone(),
    )


def all_reduce(x: Tensor, group: dist.ProcessGroup, loss: Loss = "own") -> Tensor:
    """Forward: the sum of everyone's x on every rank. Backward: own, all_reduce; replicated, identity (Megatron's g)."""
    return apply(x, lambda x: summed(x, group), lambda gradient: summed(gradient, group) if loss == "own" else gradient)


def copy(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Forward: identity, on a tensor that all ranks hold. Backward: all_reduce, as every rank used it (Megatron's f)."""
    return apply(x, Tensor.clone, lambda gradient: summed(gradient, group))


def all_to_all(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Forward: row r of x [N, ...] to rank r, which returns its rows by sender. Backward: the same, the way back."""
    return apply(x, lambda x: swapped(x, group), lambda gradient: swapped(gradient, group))


def reduce_scatter(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Forward: the sum of everyone's row r of x [N, ...] on rank r. Backward: all_gather."""
    return apply(x, lambda x: summed(x, group)[group.rank()].clone(), lambda gradient: stacked(gradient, group))
