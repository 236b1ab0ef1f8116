"""Three typical wrong answers to puzzle 18, and why each is refused."""

from collections.abc import Callable

import torch.distributed as dist
from torch import Tensor

REFUSED = {
    1: r"weights on rank 0 .* it is what comes out with a mean after every step",
    2: r"weights on rank 0 .* it is what comes out without the mean after the last step",
    3: r"weights on rank 0 differs from one process: by",
}
Gradient = Callable[[Tensor, int], Tensor]


def local_sgd_1(weights: Tensor, gradient_of: Gradient, num_steps: int, period: int, lr: float, group) -> None:
    """A mean after every step, whatever the period: data parallelism."""
    for step in range(num_steps):
        weights -= lr * gradient_of(weights, step)
        dist.all_reduce(weights, group=group)
        weights /= group.size()


def local_sgd_2(weights: Tensor, gradient_of: Gradient, num_steps: int, period: int, lr: float, group) -> None:
    """No mean after the last step, which is no multiple of the period."""
    for step in range(num_steps):
        weights -= lr * gradient_of(weights, step)
        if (step + 1) % period == 0:
            dist.all_reduce(weights, group=group)
            weights /= group.size()


def local_sgd_3(weights: Tensor, gradient_of: Gradient, num_steps: int, period: int, lr: float, group) -> None:
    """The mean of the gradients at the end of a period instead of the mean of the weights."""
    for step in range(num_steps):
        gradient = gradient_of(weights, step)
        if (step + 1) % period == 0 or step + 1 == num_steps:
            dist.all_reduce(gradient, group=group)
            gradient /= group.size()
        weights -= lr * gradient
