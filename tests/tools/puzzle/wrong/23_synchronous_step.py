"""Three typical wrong answers to puzzle 23, and why each is refused."""

import torch.distributed as dist
from torch import Tensor

REFUSED = {
    1: r"lesson gradient on rank 0 .* it is of the sum of the gradients: divide it by the 2 workers",
    2: r"lesson weights on rank 0 .* it is a step uphill",
    3: r"lesson weights on rank 0 .* it is a step without the learning rate",
}


def mean_of(gradient: Tensor, num_workers: int) -> Tensor:
    total = gradient.clone()
    dist.all_reduce(total)
    return total / num_workers


def step_1(weights: Tensor, gradient: Tensor, learning_rate: float, num_workers: int) -> tuple[Tensor, Tensor]:
    """A step by the sum of the gradients."""
    total = mean_of(gradient, 1)
    return total, weights - learning_rate * total


def step_2(weights: Tensor, gradient: Tensor, learning_rate: float, num_workers: int) -> tuple[Tensor, Tensor]:
    """A step uphill."""
    mean = mean_of(gradient, num_workers)
    return mean, weights + learning_rate * mean


def step_3(weights: Tensor, gradient: Tensor, learning_rate: float, num_workers: int) -> tuple[Tensor, Tensor]:
    """A step without the learning rate."""
    mean = mean_of(gradient, num_workers)
    return mean, weights - mean
