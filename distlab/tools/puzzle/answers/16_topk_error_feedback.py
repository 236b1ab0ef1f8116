"""The reference of puzzle 16."""

import torch
import torch.distributed as dist
from torch import Tensor


def topk_step(gradient: Tensor, error: Tensor, k: int, group: dist.ProcessGroup) -> Tensor:
    wanted = gradient + error
    places = wanted.abs().topk(k).indices
    values = wanted[places]
    error.copy_(wanted)
    error[places] = 0
    all_places = [torch.empty_like(places) for _ in range(group.size())]
    all_values = [torch.empty_like(values) for _ in range(group.size())]
    dist.all_gather(all_places, places, group=group)
    dist.all_gather(all_values, values, group=group)
    mean = torch.zeros_like(gradient)
    mean.index_add_(0, torch.cat(all_places), torch.cat(all_values) / group.size())
    return mean
