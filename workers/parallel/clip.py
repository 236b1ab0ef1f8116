"""Clipping by the global norm, where no rank holds all gradients.

The norm of a model is that of all its gradients together, so each rank adds up the squares of what is its own, the sums
are summed over the ranks, and every rank scales by the same factor. A gradient that several ranks hold counts on one of
them alone: clipping each rank's part by its own norm would turn the gradient's direction (Pascanu et al. 2013, section
3.2).
"""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

EPSILON = 1e-6  # torch.nn.utils.clip_grad_norm_ adds it to the norm, and what is ours has to equal it


@torch.no_grad()
def clip_gradients(
    once: Iterable[Tensor], every: Iterable[Tensor], max_norm: float, *groups: dist.ProcessGroup
) -> Tensor:
    """Scale `every` gradient of this rank in place, so that the global norm is at most `max_norm`; returns that norm.

    `once` are those that count on this rank: over all ranks each gradient of the model in exactly one of them. The
    `groups` of a mesh are its axes: what was summed along one is summed along the next.
    """
    every = list(every)
    squares = torch.zeros((), dtype=torch.float64, device=every[0].device if every else None)
    for gradient in once:
        squares += torch.linalg.vector_norm(gradient, dtype=torch.float64) ** 2
    for group in groups:
        dist.all_reduce(squares, group=group)
    norm = squares.sqrt()
    scale = min(1.0, max_norm / (norm.item() + EPSILON))
    if scale < 1.0:
        for gradient in every:
            gradient.mul_(scale)
    return norm
