"""Three typical wrong answers to puzzle 15, and why each is refused."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

REFUSED = {
    1: r"bytes of tensors are kept at one time on rank 0 with 2 ranks, allowed",
    2: r"bytes of tensors are kept at one time on rank 0 with 2 ranks, allowed",
    3: r"gradient 0 on rank 0 .* it is of this rank's own samples alone",
}


def gather(shard: Tensor, width: int, group: dist.ProcessGroup) -> Tensor:
    whole = shard.new_empty(group.size() * len(shard))
    dist.all_gather_into_tensor(whole, shard, group=group)
    return whole[: width * width].view(width, width)


def scattered(whole: Tensor, shard: Tensor, group: dist.ProcessGroup) -> Tensor:
    part = torch.empty_like(shard)
    missing = group.size() * len(shard) - whole.numel()
    dist.reduce_scatter_tensor(part, pad(whole.reshape(-1), (0, missing)), group=group)
    return part


def zero3_step_1(shards: list[Tensor], width: int, x: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    """All layers are gathered first, and kept to the end."""
    weights = [gather(shard, width, group) for shard in shards]
    hidden = [x]
    for weight in weights:
        hidden.append(torch.tanh(hidden[-1] @ weight.T))
    gradient, gradients = hidden[-1], []
    for shard, weight in zip(reversed(shards), reversed(weights), strict=True):
        gradient = gradient * (1 - hidden.pop() ** 2)
        gradients.insert(0, scattered(gradient.T @ hidden[-1], shard, group))
        gradient = gradient @ weight
    return gradients


def zero3_step_2(shards: list[Tensor], width: int, x: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    """The weights are freed at once, but whole gradients are kept until all are computed."""
    hidden = [x]
    for shard in shards:
        hidden.append(torch.tanh(hidden[-1] @ gather(shard, width, group).T))
    gradient, whole = hidden[-1], []
    for shard in reversed(shards):
        gradient = gradient * (1 - hidden.pop() ** 2)
        whole.insert(0, gradient.T @ hidden[-1])
        gradient = gradient @ gather(shard, width, group)
    return [scattered(each, shard, group) for each, shard in zip(whole, shards, strict=True)]


def zero3_step_3(shards: list[Tensor], width: int, x: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    """The gradient is cut into shards, but not summed over ranks."""
    hidden = [x]
    for shard in shards:
        hidden.append(torch.tanh(hidden[-1] @ gather(shard, width, group).T))
    gradient, gradients = hidden[-1], []
    for shard in reversed(shards):
        gradient = gradient * (1 - hidden.pop() ** 2)
        whole = pad((gradient.T @ hidden[-1]).reshape(-1), (0, group.size() * len(shard) - width * width))
        gradients.insert(0, whole.split(len(shard))[group.rank()].clone())
        gradient = gradient @ gather(shard, width, group)
    return gradients
