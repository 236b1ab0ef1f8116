"""The reference of puzzle 23."""

import torch.distributed as dist
from torch import Tensor


def step(weights: Tensor, gradient: Tensor, learning_rate: float, num_workers: int) -> tuple[Tensor, Tensor]:
    mean = gradient.clone()
    dist.all_reduce(mean)
    mean /= num_workers
    return mean, weights - learning_rate * mean
