"""Three typical wrong answers to puzzle 8, and why each is refused."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

REFUSED = {
    1: r"a sum in which the earlier microbatches were summed over ranks again",
    2: r"5,376 bytes are sent on rank 0 with 2 ranks, allowed 1,79",
    3: r"0.weight on rank 0 .* it is this rank's own gradient, without the others'",
}
Loss = Callable[[torch.nn.Module, Tensor, Tensor], Tensor]
Microbatches = list[tuple[Tensor, Tensor]]


def accumulate_1(
    model: torch.nn.Module, loss: Loss, microbatches: Microbatches, num_samples: int, group: dist.ProcessGroup
) -> None:
    """A sync after each microbatch, of the sum so far."""
    for inputs, targets in microbatches:
        (loss(model, inputs, targets) / num_samples).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, group=group)


def accumulate_2(
    model: torch.nn.Module, loss: Loss, microbatches: Microbatches, num_samples: int, group: dist.ProcessGroup
) -> None:
    """A sync of each microbatch's own gradients: right, but it sends three times as much."""
    for inputs, targets in microbatches:
        total = loss(model, inputs, targets) / num_samples
        for parameter, gradient in zip(
            model.parameters(), torch.autograd.grad(total, list(model.parameters())), strict=True
        ):
            summed = gradient.contiguous()
            dist.all_reduce(summed, group=group)
            parameter.grad = summed if parameter.grad is None else parameter.grad + summed


def accumulate_3(
    model: torch.nn.Module, loss: Loss, microbatches: Microbatches, num_samples: int, group: dist.ProcessGroup
) -> None:
    """A copy is summed, and the gradients stay as they are."""
    for inputs, targets in microbatches:
        (loss(model, inputs, targets) / num_samples).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad.clone(), group=group)
