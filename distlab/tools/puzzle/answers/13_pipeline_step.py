"""The reference of puzzle 13."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor


def pipeline_step(
    stage: torch.nn.Module,
    inputs: list[Tensor],
    loss: Callable[[Tensor, int], Tensor],
    shapes: list[tuple[int, int]],
    group: dist.ProcessGroup,
) -> None:
    rank, last, kept = group.rank(), group.size() - 1, []
    for number, shape in enumerate(shapes):
        x = inputs[number] if rank == 0 else torch.empty(shape, dtype=torch.float64)
        if rank > 0:
            dist.recv(x, group_src=rank - 1, group=group)
            x.requires_grad_()
        output = stage(x) if rank < last else loss(stage(x), number)
        if rank < last:
            dist.send(output.detach(), group_dst=rank + 1, group=group)
        kept.append((x, output))
    for x, output in kept:
        gradient = torch.empty_like(output) if rank < last else None
        if rank < last:
            dist.recv(gradient, group_src=rank + 1, group=group)
        output.backward(gradient)
        if rank > 0:
            dist.send(x.grad, group_dst=rank - 1, group=group)
