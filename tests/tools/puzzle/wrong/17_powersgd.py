"""Three typical wrong answers to puzzle 17, and why each is refused."""

import torch
import torch.distributed as dist
from torch import Tensor

REFUSED = {
    1: r"17,112 bytes are sent on rank 0 with 2 ranks, allowed 3,888",
    2: r"mean 0 on rank 0 .* it is what comes out if P is not made orthonormal",
    3: r"mean 1 on rank 0 .* it is what comes out if errors are never added",
}


def summed(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = tensor.contiguous()
    dist.all_reduce(total, group=group)
    return total


def powersgd_step_1(gradient: Tensor, error: Tensor, q: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """The whole matrix is averaged first, and then compressed: all of it is sent."""
    error += gradient
    whole = summed(error.clone(), group) / group.size()
    p = torch.linalg.qr(whole @ q).Q
    q = whole.T @ p
    error -= p @ q.T
    return p @ q.T, q


def powersgd_step_2(gradient: Tensor, error: Tensor, q: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """P is not made orthonormal."""
    error += gradient
    p = summed(error @ q, group) / group.size()
    q = summed(error.T @ p, group) / group.size()
    error -= p @ q.T
    return p @ q.T, q


def powersgd_step_3(gradient: Tensor, error: Tensor, q: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """The error is kept, but never added."""
    p = torch.linalg.qr(summed(gradient @ q, group)).Q
    q = summed(gradient.T @ p, group) / group.size()
    error.copy_(gradient - p @ q.T)
    return p @ q.T, q
