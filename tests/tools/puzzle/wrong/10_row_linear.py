"""Three typical wrong answers to puzzle 10, and why each is refused."""

import torch
import torch.distributed as dist
from torch import Tensor

REFUSED = {
    1: r"outputs on rank 0 .* it is the sum with the bias added once on every rank",
    2: r"x.grad on rank 0 .* it is 2 times what it should be \(the number of ranks\)",
    3: r"outputs on rank 0 .* it is this rank's own part of the sum: the others' is missing",
}


class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, part: Tensor, group: dist.ProcessGroup, in_backward: bool) -> Tensor:
        ctx.group, ctx.in_backward = group, in_backward
        total = part.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None]:
        gradient = gradient.clone()
        if ctx.in_backward:
            dist.all_reduce(gradient, group=ctx.group)
        return gradient, None, None


def row_linear_1(x: Tensor, weight: Tensor, bias: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Each rank adds the bias to its part."""
    return Sum.apply(x @ weight.T + bias, group, False)


def row_linear_2(x: Tensor, weight: Tensor, bias: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The gradient, which is the same on all ranks, is summed over them as well."""
    return Sum.apply(x @ weight.T, group, True) + bias


def row_linear_3(x: Tensor, weight: Tensor, bias: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Nothing is summed in the forward pass."""
    return x @ weight.T + bias
