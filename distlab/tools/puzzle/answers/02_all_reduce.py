"""The reference of puzzle 2."""

import torch
import torch.distributed as dist
from torch import Tensor


def all_reduce(tensor: Tensor, group: dist.ProcessGroup) -> None:
    rank, last = group.rank(), group.size() - 1
    if rank < last:
        received = torch.empty_like(tensor)
        dist.recv(received, group_src=rank + 1, group=group)
        tensor += received
    if rank > 0:
        dist.send(tensor, group_dst=rank - 1, group=group)
        dist.recv(tensor, group_src=rank - 1, group=group)
    if rank < last:
        dist.send(tensor, group_dst=rank + 1, group=group)
