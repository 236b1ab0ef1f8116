"""Tensor parallelism: every rank computes a slice of each matrix product, on the same samples.

A product can be cut in two ways (Shoeybi et al. 2019, "Megatron-LM", section 3). By the rows of the weight, which are
its outputs: each rank gets some of the outputs, with nothing sent. By the columns, its inputs: each rank gets all
outputs, but only its part of their sum. One after the other they fit together, since what the first leaves on a rank is
what the second needs there, and whatever works on each output by itself may stand between: an activation, or a whole
attention head.

    y = W2 gelu(W1 x)        W1 by rows, W2 by columns: one sum over the ranks, after W2

What stands at the two ends is a pair of maps, each the other's transpose, so that a forward pass through one is a
backward pass through the other (`Region`):

                between slices              into a slice                        out of a slice
    Whole       everything on every rank    f: as it is; backward all_reduce    g: all_reduce; backward as it is
    Sequence    a part of the rows each     gather: all_gather;                 scatter: reduce_scatter;
                (sequence.py)               backward reduce_scatter             backward all_gather
"""

from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from workers.parallel.phases import phase
from workers.parallel.slices import Slice
from workers.parallel.split_backward import Product


class Region(Protocol):
    """What stands before and after a part of the model whose ranks each compute a slice."""

    def enter(self, x: Tensor) -> Tensor:
        """What lies between blocks, [..., D], as each rank's slice needs it: all rows."""

    def leave(self, partial: Tensor) -> Tensor:
        """The sum of all ranks' `partial`, [..., D], as it lies between blocks."""


class Whole:
    """Every rank holds all activations between the blocks: Shoeybi's f and g (f and f-bar in Korthikanti's figure
    4)."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def enter(self, x: Tensor) -> Tensor:
        """f."""
        return Copy.apply(x, self.group)  # type: ignore[no-any-return, no-untyped-call]

    def leave(self, partial: Tensor) -> Tensor:
        """g, in place of `partial`."""
        return Reduce.apply(partial, self.group)  # type: ignore[no-any-return, no-untyped-call]


class Copy(torch.autograd.Function):
    """f. Forward: identity. Backward: all_reduce, since every rank used x for its slice, and each has a part of the
    gradient.

    The gradient is summed where it stands. What follows has to make one that nobody else sees, as a linear layer does.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return all_reduce(gradients[0].contiguous(), ctx.group), None


class Reduce(torch.autograd.Function):
    """g. Forward: all_reduce, in place. Backward: identity, for the loss behind it is the same one on every rank."""

    @staticmethod
    def forward(ctx: Any, partial: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.mark_dirty(partial)
        return all_reduce(partial, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:  # noqa: ARG004
        return gradients[0], None


def all_reduce(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """x, summed over the ranks in place."""
    with phase("all_reduce"):
        dist.all_reduce(x, group=group)
    return x


class ColumnParallelLinear(nn.Module):
    """This rank's outputs of a linear layer: [..., D] to [..., sizes[rank]].

    Named for the columns of the paper's x·A, which are the rows of torch's weight. x has come through `Region.enter`,
    once for all the layers that take it: one sum of gradients for q, k and v together.
    """

    def __init__(self, dense: nn.Linear, sizes: tuple[int, ...], rank: int) -> None:
        super().__init__()
        self.slices = {name: Slice(0, sizes) for name, _ in dense.named_parameters()}
        self.weight = nn.Parameter(self.slices["weight"].piece(dense.weight, rank))
        self.bias = None if dense.bias is None else nn.Parameter(self.slices["bias"].piece(dense.bias, rank))
        self.product: Product = F.linear  # a pipeline may split its backward pass (split_backward.py)

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, self.weight, self.bias)  # [..., D/tp]


class RowParallelLinear(nn.Module):
    """This rank's inputs of a linear layer: [..., sizes[rank]] to [..., D], which `region` sums over the ranks.

    The bias is whole on every rank and is added once, to the sum: added to each part it would count N times.
    """

    def __init__(self, dense: nn.Linear, sizes: tuple[int, ...], rank: int, region: Region) -> None:
        super().__init__()
        self.slices = {"weight": Slice(1, sizes)}
        self.region = region
        self.weight = nn.Parameter(self.slices["weight"].piece(dense.weight, rank))
        self.bias = None if dense.bias is None else nn.Parameter(dense.bias.detach().clone())
        self.product: Product = F.linear

    def forward(self, x: Tensor) -> Tensor:
        total = self.region.leave(self.product(x, self.weight, None))  # [..., D]
        return total if self.bias is None else total.add_(self.bias)
