"""Three typical wrong answers to puzzle 6, and why each is refused."""

import torch
import torch.distributed as dist
from torch import Tensor

REFUSED = {
    1: r"3 collectives are called on rank 0 with 2 ranks, allowed 1",
    2: r"weight on rank 0 .* it is what this rank had before",
    3: r"head on rank 0 .* it is what this rank had before",
}


def average_in_one_call_1(gradients: list[Tensor], group: dist.ProcessGroup) -> None:
    """One call per gradient."""
    for gradient in gradients:
        summed = gradient.contiguous()
        dist.all_reduce(summed, group=group)
        gradient.copy_(summed / group.size())


def average_in_one_call_2(gradients: list[Tensor], group: dist.ProcessGroup) -> None:
    """The bucket is averaged, and not copied back: torch.cat gives a copy, no view."""
    bucket = torch.cat([gradient.reshape(-1) for gradient in gradients])
    dist.all_reduce(bucket, group=group)
    bucket /= group.size()


def average_in_one_call_3(gradients: list[Tensor], group: dist.ProcessGroup) -> None:
    """A gradient that is not contiguous is written into a copy, which is lost."""
    bucket = torch.cat([gradient.reshape(-1) for gradient in gradients])
    dist.all_reduce(bucket, group=group)
    parts = (bucket / group.size()).split([gradient.numel() for gradient in gradients])
    for gradient, part in zip(gradients, parts, strict=True):
        gradient.reshape(-1).copy_(part)
