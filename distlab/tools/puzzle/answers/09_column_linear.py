"""The reference of puzzle 9."""

import torch
import torch.distributed as dist
from torch import Tensor


class SumInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        summed = gradient.contiguous()
        dist.all_reduce(summed, group=ctx.group)
        return summed, None


def column_linear(x: Tensor, weight: Tensor, group: dist.ProcessGroup) -> Tensor:
    return SumInBackward.apply(x, group) @ weight.T
