"""The reference of puzzle 15."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad


def zero3_step(shards: list[Tensor], width: int, x: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    def gather(shard: Tensor) -> Tensor:
        whole = shard.new_empty(group.size() * len(shard))
        dist.all_gather_into_tensor(whole, shard, group=group)
        return whole[: width * width].view(width, width)

    hidden = [x]
    for shard in shards:
        hidden.append(torch.tanh(hidden[-1] @ gather(shard).T))
    gradient, gradients = hidden[-1], []
    for shard in reversed(shards):
        gradient = gradient * (1 - hidden.pop() ** 2)
        whole = (gradient.T @ hidden[-1]).reshape(-1)
        part = torch.empty_like(shard)
        dist.reduce_scatter_tensor(part, pad(whole, (0, group.size() * len(shard) - len(whole))), group=group)
        gradients.insert(0, part)
        gradient = gradient @ gather(shard)
    return gradients
