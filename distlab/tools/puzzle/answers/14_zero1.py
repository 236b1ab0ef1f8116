"""The reference of puzzle 14."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad


def zero1_step(weights: Tensor, gradient: Tensor, momentum: Tensor, lr: float, group: dist.ProcessGroup) -> None:
    n, size = group.size(), len(momentum)
    missing = n * size - len(weights)
    shard = torch.empty_like(momentum)
    dist.reduce_scatter_tensor(shard, pad(gradient, (0, missing)), group=group)
    momentum.mul_(0.9).add_(shard / n)
    padded = pad(weights, (0, missing))
    updated = padded.split(size)[group.rank()] - lr * momentum
    dist.all_gather_into_tensor(padded, updated, group=group)
    weights.copy_(padded[: len(weights)])
