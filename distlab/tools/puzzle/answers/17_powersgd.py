"""The reference of puzzle 17."""

import torch
import torch.distributed as dist
from torch import Tensor


def powersgd_step(gradient: Tensor, error: Tensor, q: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    error += gradient
    p = error @ q
    dist.all_reduce(p, group=group)
    p = torch.linalg.qr(p).Q
    q = (error.T @ p).contiguous()
    dist.all_reduce(q, group=group)
    q = q / group.size()
    mean = p @ q.T
    error -= mean
    return mean, q
