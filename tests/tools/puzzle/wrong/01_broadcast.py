"""Three typical wrong answers to puzzle 1, and why each is refused."""

import torch.distributed as dist
from torch import Tensor

REFUSED = {
    1: r"3 messages are sent on rank 1 with 4 ranks, allowed 2",
    2: r"tensor on rank \d differs .* it is the tensor of rank 0, which is not the root",
    3: r"waits? .*01_broadcast.py",
}


def broadcast_1(tensor: Tensor, root: int, group: dist.ProcessGroup) -> None:
    """The root sends to all ranks, one after another."""
    if group.rank() != root:
        dist.recv(tensor, group_src=root, group=group)
        return
    for other in range(group.size()):
        if other != root:
            dist.send(tensor, group_dst=other, group=group)


def broadcast_2(tensor: Tensor, root: int, group: dist.ProcessGroup) -> None:
    """The places are counted from rank 0, not from the root."""
    n, place, reached = group.size(), group.rank(), 1
    while reached < n:
        if place < reached and place + reached < n:
            dist.send(tensor, group_dst=place + reached, group=group)
        elif reached <= place < 2 * reached:
            dist.recv(tensor, group_src=place - reached, group=group)
        reached *= 2


def broadcast_3(tensor: Tensor, root: int, group: dist.ProcessGroup) -> None:
    """Passed on around the ring, but the root too waits for its left neighbour before it begins."""
    n, rank = group.size(), group.rank()
    if n > 1:
        dist.recv(tensor, group_src=(rank - 1) % n, group=group)
        dist.send(tensor, group_dst=(rank + 1) % n, group=group)
