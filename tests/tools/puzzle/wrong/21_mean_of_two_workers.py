"""Three typical wrong answers to puzzle 21, and why each is refused."""

import torch.distributed as dist
from torch import Tensor

REFUSED = {
    1: r"lesson on rank 0 .* it is the sum: divide it by the 2 workers",
    2: r"lesson on rank 0 .* it is this rank's own gradient, divided: nothing was added up over the workers",
    3: r"other on rank 0 .* it is the sum by the number of parameters: the workers count",
}


def averaged_1(gradient: Tensor, num_workers: int) -> Tensor:
    """The sum instead of the mean."""
    total = gradient.clone()
    dist.all_reduce(total)
    return total


def averaged_2(gradient: Tensor, num_workers: int) -> Tensor:
    """Nothing is sent."""
    return gradient / num_workers


def averaged_3(gradient: Tensor, num_workers: int) -> Tensor:
    """Right for two workers and two parameters."""
    total = gradient.clone()
    dist.all_reduce(total)
    return total / len(total)
