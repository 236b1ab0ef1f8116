"""The reference of puzzle 6."""

import torch
import torch.distributed as dist
from torch import Tensor


def average_in_one_call(gradients: list[Tensor], group: dist.ProcessGroup) -> None:
    bucket = torch.cat([gradient.reshape(-1) for gradient in gradients])
    dist.all_reduce(bucket, group=group)
    parts = (bucket / group.size()).split([gradient.numel() for gradient in gradients])
    for gradient, part in zip(gradients, parts, strict=True):
        gradient.copy_(part.view(gradient.shape))
