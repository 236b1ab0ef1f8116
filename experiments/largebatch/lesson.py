"""Large batches (linear scaling and warm-up): torchrun --nproc-per-node 3 lesson.py"""

from copy import deepcopy

import torch
import torch.distributed as dist
from torch import Tensor, nn


def linear(k: float) -> float:
    """Returns the factor k: k steps of η along nearly equal gradients are one step of kη."""
    return float(k)


def warmup(target: float, step: int, warmup_steps: int) -> float:
    """Rises from 1 to `target`: early gradients change with each step and are not nearly equal."""
    if step >= warmup_steps:
        return float(target)
    return 1.0 + (target - 1.0) * step / warmup_steps


def train(
    model: nn.Module, batches: list[tuple[Tensor, Tensor]], k: int, base: float, group: dist.ProcessGroup
) -> None:
    """Batches of k times the base's samples, so k times fewer of them; each rank takes its part of each [k·B/N, D]."""
    for step, (inputs, targets) in enumerate(batches):
        mine = slice(group.rank(), None, group.size())
        model.zero_grad()
        loss = (model(inputs[mine]) - targets[mine]).square().sum() / targets.numel()  # of the whole batch, a mean
        loss.backward()
        rate = base * warmup(linear(k), step, len(batches) // 4)
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, group=group)
            parameter.data -= rate * parameter.grad


def demo(group: dist.ProcessGroup) -> float:
    """Train 8 steps of 4 x 8 samples at 1, 2.5, 4, 4, ... times the base rate; return the largest error of a weight."""
    torch.manual_seed(1)
    model = nn.Linear(4, 4).double()
    alone, batches = deepcopy(model), [tuple(torch.randn(2, 32, 4).double()) for _ in range(8)]
    train(model, batches, 4, 0.05, group)
    for (inputs, targets), times in zip(batches, (1, 2.5, 4, 4, 4, 4, 4, 4), strict=True):
        gradients = torch.autograd.grad((alone(inputs) - targets).square().mean(), list(alone.parameters()))
        for parameter, gradient in zip(alone.parameters(), gradients, strict=True):
            parameter.data -= 0.05 * times * gradient
    return max((a - b).abs().max().item() for a, b in zip(model.parameters(), alone.parameters(), strict=True))


if __name__ == "__main__":
    dist.init_process_group("gloo")
    print(f"rank {dist.get_rank()}: weights differ from one process's by {demo(dist.group.WORLD):.0e} at most")
    dist.destroy_process_group()
