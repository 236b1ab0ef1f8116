"""Three typical wrong answers to puzzle 5, and why each is refused."""

import torch
import torch.distributed as dist
from torch import Tensor

REFUSED = {
    1: r"weight on rank 0 .* it is the mean of the ranks' means, as if all had the same number of samples",
    2: r"weight on rank 0 .* it is divided by N times this rank's own number of samples",
    3: r"weight on rank 0 .* it is the sum of the ranks' means divided by all samples",
}


def average_gradients_1(gradients: list[Tensor], num_samples: int, group: dist.ProcessGroup) -> None:
    """The mean over ranks."""
    for gradient in gradients:
        summed = gradient.contiguous()
        dist.all_reduce(summed, group=group)
        gradient.copy_(summed / group.size())


def average_gradients_2(gradients: list[Tensor], num_samples: int, group: dist.ProcessGroup) -> None:
    """The right sum, divided as if all ranks had as many samples as this one."""
    for gradient in gradients:
        summed = (gradient * num_samples).contiguous()
        dist.all_reduce(summed, group=group)
        gradient.copy_(summed / (num_samples * group.size()))


def average_gradients_3(gradients: list[Tensor], num_samples: int, group: dist.ProcessGroup) -> None:
    """The right number of samples, but the means are added, not the sums."""
    total = torch.tensor(float(num_samples), dtype=torch.float64)
    dist.all_reduce(total, group=group)
    for gradient in gradients:
        summed = gradient.contiguous()
        dist.all_reduce(summed, group=group)
        gradient.copy_(summed / total)
