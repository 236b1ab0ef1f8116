"""Three typical wrong answers to puzzle 9, and why each is refused."""

import torch
import torch.distributed as dist
from torch import Tensor

REFUSED = {
    1: r"x.grad on rank 0 .* it is this rank's own part of the sum: the others' is missing",
    2: r"outputs on rank 0 .* it is 2 times what it should be \(the number of ranks\)",
    3: r"x.grad on rank 0 .* it is 0.5 times what it should be \(1 / the number of ranks\)",
}


def column_linear_1(x: Tensor, weight: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Right in the forward pass, but nothing is summed in the backward pass."""
    return x @ weight.T


def column_linear_2(x: Tensor, weight: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The inputs, which all ranks have, are summed in the forward pass."""
    summed = x.detach().clone()
    dist.all_reduce(summed, group=group)
    return summed.requires_grad_() @ weight.T


class MeanInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        summed = gradient.contiguous()
        dist.all_reduce(summed, group=ctx.group)
        return summed / ctx.group.size(), None


def column_linear_3(x: Tensor, weight: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The parts are averaged, as gradients of data parallelism are."""
    return MeanInBackward.apply(x, group) @ weight.T
