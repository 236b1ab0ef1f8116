"""Three typical wrong answers to puzzle 2, and why each is refused."""

import torch
import torch.distributed as dist
from torch import Tensor

REFUSED = {
    1: r"tensor on rank \d differs from one process: by",
    2: r"all ranks together send 48,144 bytes with 3 ranks, allowed 32,096",
    3: r"waits? .*02_all_reduce.py",
}


def all_reduce_1(tensor: Tensor, group: dist.ProcessGroup) -> None:
    """Recursive doubling, which is right for powers of two only."""
    n, rank, distance = group.size(), group.rank(), 1
    while distance < n:
        other = rank ^ distance
        if other < n:
            received = torch.empty_like(tensor)
            sending = dist.isend(tensor, group_dst=other, group=group)
            dist.recv(received, group_src=other, group=group)
            sending.wait()
            tensor += received
        distance *= 2


def all_reduce_2(tensor: Tensor, group: dist.ProcessGroup) -> None:
    """Every rank sends to every other one."""
    own = tensor.clone()
    others = [other for other in range(group.size()) if other != group.rank()]
    sending = [dist.isend(own, group_dst=other, group=group) for other in others]
    for other in others:
        received = torch.empty_like(tensor)
        dist.recv(received, group_src=other, group=group)
        tensor += received
    for each in sending:
        each.wait()


def all_reduce_3(tensor: Tensor, group: dist.ProcessGroup) -> None:
    """Around the ring, but all ranks send before they receive."""
    n, rank, passed = group.size(), group.rank(), tensor.clone()
    for _ in range(n - 1):
        dist.send(passed, group_dst=(rank + 1) % n, group=group)
        dist.recv(passed, group_src=(rank - 1) % n, group=group)
        tensor += passed
