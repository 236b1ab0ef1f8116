"""The reference of puzzle 5."""

import torch
import torch.distributed as dist
from torch import Tensor


def average_gradients(gradients: list[Tensor], num_samples: int, group: dist.ProcessGroup) -> None:
    total = torch.tensor(float(num_samples), dtype=torch.float64)
    dist.all_reduce(total, group=group)
    for gradient in gradients:
        summed = (gradient * num_samples).contiguous()
        dist.all_reduce(summed, group=group)
        gradient.copy_(summed / total)
