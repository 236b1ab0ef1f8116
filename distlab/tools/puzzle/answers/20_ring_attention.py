"""The reference of puzzle 20."""

import math

import torch
import torch.distributed as dist
from torch import Tensor


def ring_attention(q: Tensor, k: Tensor, v: Tensor, sizes: list[int], group: dist.ProcessGroup) -> Tensor:
    n, rank = group.size(), group.rank()
    largest = q.new_full((len(q), 1), -math.inf)
    total, output = torch.zeros_like(largest), torch.zeros_like(q)
    for i in range(n):
        scores = q @ k.T / math.sqrt(q.shape[1])
        new = torch.maximum(largest, scores.amax(1, keepdim=True))
        weights, kept = (scores - new).exp(), (largest - new).exp()
        total, output, largest = total * kept + weights.sum(1, keepdim=True), output * kept + weights @ v, new
        if i < n - 1:
            sending = [dist.isend(each, group_dst=(rank + 1) % n, group=group) for each in (k, v)]
            k, v = (q.new_empty(sizes[(rank - i - 1) % n], q.shape[1]) for _ in range(2))
            for each in (k, v):
                dist.recv(each, group_src=(rank - 1) % n, group=group)
            for each in sending:
                each.wait()
    return output / total
