"""Three typical wrong answers to puzzle 14, and why each is refused."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

REFUSED = {
    1: r"36,144 bytes are sent on rank 0 with 2 ranks, allowed 24,096",
    2: r"momentum on rank 0 .* it is what comes out if each rank keeps old weights of the others",
    3: r"momentum on rank 0 .* it is what sums in the place of means give",
}


def zero1_step_1(weights: Tensor, gradient: Tensor, momentum: Tensor, lr: float, group: dist.ProcessGroup) -> None:
    """An all_reduce of the whole gradient, of which each rank uses its part: it sends 1.5 times as much."""
    n, size = group.size(), len(momentum)
    missing = n * size - len(weights)
    summed = pad(gradient, (0, missing))
    dist.all_reduce(summed, group=group)
    momentum.mul_(0.9).add_(summed.split(size)[group.rank()] / n)
    padded = pad(weights, (0, missing))
    dist.all_gather_into_tensor(padded, padded.split(size)[group.rank()] - lr * momentum, group=group)
    weights.copy_(padded[: len(weights)])


def zero1_step_2(weights: Tensor, gradient: Tensor, momentum: Tensor, lr: float, group: dist.ProcessGroup) -> None:
    """Each rank updates its part of the weights, and keeps the old ones of the others."""
    n, size, rank = group.size(), len(momentum), group.rank()
    shard = torch.empty_like(momentum)
    dist.reduce_scatter_tensor(shard, pad(gradient, (0, n * size - len(weights))), group=group)
    momentum.mul_(0.9).add_(shard / n)
    mine = weights.split(size)[rank]
    mine -= lr * momentum[: len(mine)]


def zero1_step_3(weights: Tensor, gradient: Tensor, momentum: Tensor, lr: float, group: dist.ProcessGroup) -> None:
    """The sum over ranks instead of the mean."""
    n, size = group.size(), len(momentum)
    missing = n * size - len(weights)
    shard = torch.empty_like(momentum)
    dist.reduce_scatter_tensor(shard, pad(gradient, (0, missing)), group=group)
    momentum.mul_(0.9).add_(shard)
    padded = pad(weights, (0, missing))
    dist.all_gather_into_tensor(padded, padded.split(size)[group.rank()] - lr * momentum, group=group)
    weights.copy_(padded[: len(weights)])
