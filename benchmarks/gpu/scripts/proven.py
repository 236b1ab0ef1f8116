"""A model and a batch on a card, for `distlab prove`: DDP over ranks that share it; with WRONG=1 one that forgets the
share of its microbatch."""

import os
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FORGETS = os.environ.get("WRONG") == "1"


def model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 11), nn.Tanh(), nn.Linear(11, 3)).to(DEVICE)


def batch(seed: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * seed + step)
    inputs = torch.randn(13, 6, generator=generator, dtype=torch.float64)
    return inputs.to(DEVICE), inputs[:, :3].sin().to(DEVICE)


def loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    squares: Tensor = (model(inputs) - targets).square()
    return squares.sum()


def prepare(model: nn.Module, group: dist.ProcessGroup) -> nn.Module:
    return DistributedDataParallel(model, process_group=group)


def train_step(model: Any, optimizer: torch.optim.Optimizer, microbatches: Any, group: dist.ProcessGroup) -> float:
    optimizer.zero_grad()
    total = 0.0
    for index, (inputs, targets, share) in enumerate(microbatches):
        with nullcontext() if index == len(microbatches) - 1 else model.no_sync():
            found = loss(model, inputs, targets) * (1 / len(inputs) if FORGETS else share)
            (found * dist.get_world_size(group)).backward()
            total += found.item()
    optimizer.step()
    return total
