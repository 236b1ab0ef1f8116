"""Three typical wrong answers to puzzle 20, and why each is refused."""

import math

import torch
import torch.distributed as dist
from torch import Tensor

REFUSED = {
    1: r"output on rank 0 .* it is the mean of each block's own attention, whatever its scores",
    2: r"waits? .*20_ring_attention.py",
    3: r"bytes of tensors are kept at one time on rank \d with \d ranks, allowed",
}
Sizes = list[int]


def passed_on(tensors: list[Tensor], size: int, group: dist.ProcessGroup) -> list[Tensor]:
    n, rank = group.size(), group.rank()
    sending = [dist.isend(each, group_dst=(rank + 1) % n, group=group) for each in tensors]
    arrived = [each.new_empty(size, each.shape[1]) for each in tensors]
    for each in arrived:
        dist.recv(each, group_src=(rank - 1) % n, group=group)
    for each in sending:
        each.wait()
    return arrived


def ring_attention_1(q: Tensor, k: Tensor, v: Tensor, sizes: Sizes, group: dist.ProcessGroup) -> Tensor:
    """The mean of each block's own softmax."""
    n, output, block = group.size(), torch.zeros_like(q), [k, v]
    for i in range(n):
        output += torch.softmax(q @ block[0].T / math.sqrt(q.shape[1]), 1) @ block[1] / n
        if i < n - 1:
            block = passed_on(block, sizes[(group.rank() - i - 1) % n], group)
    return output


def ring_attention_2(q: Tensor, k: Tensor, v: Tensor, sizes: Sizes, group: dist.ProcessGroup) -> Tensor:
    """All ranks send first, and wait for a receiver."""
    n, rank, blocks = group.size(), group.rank(), [(k, v)]
    for i in range(n - 1):
        for each in blocks[-1]:
            dist.send(each, group_dst=(rank + 1) % n, group=group)
        arrived = [q.new_empty(sizes[(rank - i - 1) % n], q.shape[1]) for _ in range(2)]
        for each in arrived:
            dist.recv(each, group_src=(rank - 1) % n, group=group)
        blocks.append((arrived[0], arrived[1]))
    keys, values = (torch.cat(each) for each in zip(*blocks, strict=True))
    return torch.softmax(q @ keys.T / math.sqrt(q.shape[1]), 1) @ values


def ring_attention_3(q: Tensor, k: Tensor, v: Tensor, sizes: Sizes, group: dist.ProcessGroup) -> Tensor:
    """All blocks are kept, and attention is computed after the last one."""
    n, blocks = group.size(), [[k, v]]
    for i in range(n - 1):
        blocks.append(passed_on(blocks[-1], sizes[(group.rank() - i - 1) % n], group))
    keys, values = (torch.cat(each) for each in zip(*blocks, strict=True))
    return torch.softmax(q @ keys.T / math.sqrt(q.shape[1]), 1) @ values
