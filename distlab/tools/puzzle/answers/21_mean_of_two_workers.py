"""The reference of puzzle 21."""

import torch.distributed as dist
from torch import Tensor


def averaged(gradient: Tensor, num_workers: int) -> Tensor:
    total = gradient.clone()
    dist.all_reduce(total)
    return total / num_workers
