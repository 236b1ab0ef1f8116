"""The reference of puzzle 10."""

import torch
import torch.distributed as dist
from torch import Tensor


class SumInForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = part.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def row_linear(x: Tensor, weight: Tensor, bias: Tensor, group: dist.ProcessGroup) -> Tensor:
    return SumInForward.apply(x @ weight.T, group) + bias
