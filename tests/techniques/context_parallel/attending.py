"""Helpers that compare attention over the positions of all ranks with attention in one process."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from distlab.lab.measure.traffic import Calls
from distlab.techniques.context_parallel.strategy import Positions

HEAD_DIM = 4
# From a group and positions to a function of q, k and v of a rank's rows.
Way = Callable[[dist.ProcessGroup, Positions], Callable[[Tensor, Tensor, Tensor], Tensor]]


def drawn(length: int, heads: int) -> Tensor:
    """q, k, v and the gradient of the result, [4, B, heads, S, head_dim]."""
    generator = torch.Generator().manual_seed(length)
    return torch.randn(4, 2, heads, length, HEAD_DIM, generator=generator, dtype=torch.float64)


def differences(
    group: dist.ProcessGroup, way: Way, cut: Callable[[int, int], Positions], length: int, heads: int
) -> tuple[dict[str, float], int]:
    """The largest errors of this rank's result and gradients compared with one process, and its number of calls."""
    whole = drawn(length, heads)
    dense = q, k, v = tuple(each.clone().requires_grad_() for each in whole[:3].unbind())
    wanted = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    wanted.backward(whole[3])
    positions = cut(length, group.size())
    rows = positions.of(group.rank())
    mine = [each[:, :, rows].requires_grad_() for each in whole[:3]]
    with Calls() as calls:
        found = way(group, positions)(*mine)
        found.backward(whole[3][:, :, rows])
    errors = {"out": worst(found, wanted[:, :, rows])}
    for name, leaf, dense_leaf in zip("qkv", mine, dense, strict=True):
        assert leaf.grad is not None and dense_leaf.grad is not None
        errors[f"d{name}"] = worst(leaf.grad, dense_leaf.grad[:, :, rows])
    return errors, sum(int(op.calls) for op in calls.ops())


def worst(found: Tensor, wanted: Tensor) -> float:
    """The largest difference; infinite if the shapes differ."""
    if found.shape != wanted.shape:
        return float("inf")
    return (found - wanted).abs().max().item() if found.numel() else 0.0


def max_over_ranks(of_ranks: list[tuple[dict[str, float], int]], name: str) -> float:
    """The largest of this error on any rank."""
    return max(errors[name] for errors, _ in of_ranks)
