"""The reference of puzzle 11."""

import torch
import torch.distributed as dist
from torch import Tensor


def cross_entropy(logits: Tensor, targets: Tensor, first: int, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    largest = logits.max(1).values
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    exponentials = (logits - largest[:, None]).exp()
    total = exponentials.sum(1)
    dist.all_reduce(total, group=group)
    mine = ((targets >= first) & (targets < first + logits.shape[1])).nonzero()[:, 0]
    words = targets[mine] - first
    target = torch.zeros_like(total)
    target[mine] = logits[mine, words]
    dist.all_reduce(target, group=group)
    gradient = exponentials / total[:, None]
    gradient[mine, words] -= 1
    return total.log() + largest - target, gradient
