"""Three typical wrong answers to puzzle 3, and why each is refused."""

import torch
import torch.distributed as dist
from torch import Tensor

REFUSED = {
    1: r"16,048 bytes are sent on rank 0 with 3 ranks, allowed 10,720",
    2: r"tensor on rank \d differs from one process: by",
    3: r"tensor on rank \d differs .* in 1 of 1003 numbers, those from 1002 to 1002",
}


def ring_all_reduce_1(tensor: Tensor, group: dist.ProcessGroup) -> None:
    """The whole tensor is sent around, not a chunk of it."""
    passed = tensor.clone()
    for _ in range(group.size() - 1):
        passed = sent([passed] * group.size(), 0, 0, group)
        tensor += passed


def ring(chunks: list[Tensor], group: dist.ProcessGroup, first: int) -> None:
    """`first` is the chunk that is sent first in the second half, counted from the rank."""
    n, rank = group.size(), group.rank()
    for i in range(n - 1):
        chunks[(rank - i - 1) % n].add_(sent(chunks, rank - i, rank - i - 1, group))
    for i in range(n - 1):
        chunks[(rank + first - i - 1) % n].copy_(sent(chunks, rank + first - i, rank + first - i - 1, group))


def sent(chunks: list[Tensor], sent: int, received: int, group: dist.ProcessGroup) -> Tensor:
    n, rank = group.size(), group.rank()
    arrived = torch.empty_like(chunks[received % n])
    sending = dist.isend(chunks[sent % n], group_dst=(rank + 1) % n, group=group)
    dist.recv(arrived, group_src=(rank - 1) % n, group=group)
    sending.wait()
    return arrived


def ring_all_reduce_2(tensor: Tensor, group: dist.ProcessGroup) -> None:
    """The second half begins with the wrong chunk, one that is not finished."""
    ring(list(tensor.tensor_split(group.size())), group, first=0)


def ring_all_reduce_3(tensor: Tensor, group: dist.ProcessGroup) -> None:
    """The chunks have the same size, and the remaining numbers belong to none."""
    n = group.size()
    ring([tensor[i * (len(tensor) // n) : (i + 1) * (len(tensor) // n)] for i in range(n)], group, first=1)
