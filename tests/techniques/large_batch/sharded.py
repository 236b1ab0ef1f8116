"""A few weights, complete or sharded over ranks, for the tests of layer-wise optimizers."""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distlab.techniques.large_batch import Group

SHAPES = [(7, 5), (5,), (4, 6), (1, 3)]  # with a bias, and a matrix of which the third rank has nothing
STEPS = 4


def weights(dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    draw = torch.Generator().manual_seed(5)
    return [nn.Parameter(torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype)) for shape in SHAPES]


def gradients(step: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    draw = torch.Generator().manual_seed(100 + step)
    return [torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype) for shape in SHAPES]


def part(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """This rank's run of a tensor's numbers; the runs are uneven, and may be empty."""
    flat = tensor.flatten()
    ends = [len(flat) * rank**2 // group.size() ** 2 for rank in range(group.size() + 1)]
    return flat[ends[group.rank()] : ends[group.rank() + 1]]


def groups(parameters: list[nn.Parameter], decay: float) -> list[Group]:
    """Like `split_by_decay`, but by the shapes of complete weights, because a shard is always a vector."""
    matrices = [p for p, shape in zip(parameters, SHAPES, strict=True) if len(shape) > 1]
    vectors = [p for p, shape in zip(parameters, SHAPES, strict=True) if len(shape) == 1]
    return [
        {"params": matrices, "weight_decay": decay, "adapted": True},
        {"params": vectors, "weight_decay": 0.0, "adapted": False},
    ]


def train(optimizer: object, parameters: list[nn.Parameter], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Make a few steps with random gradients."""
    for step in range(STEPS):
        for parameter, gradient in zip(parameters, gradients(step, dtype), strict=True):
            parameter.grad = gradient
        optimizer.step()  # type: ignore[attr-defined]
    return [parameter.detach() for parameter in parameters]


def trained_in_parts(group: dist.ProcessGroup, kind: type, rate: float, decay: float, is_sharded: bool) -> float:
    """The largest error of a rank's shards; with `is_sharded` the optimizer knows that the weights are sharded."""
    whole = weights()
    dense = train(kind(groups(whole, decay), rate), whole)
    parts = [nn.Parameter(part(weight, group).clone()) for weight in weights()]
    optimizer = kind(groups(parts, decay), rate, sharded_over=group if is_sharded else None)
    for step in range(STEPS):
        for parameter, gradient in zip(parts, gradients(step), strict=True):
            parameter.grad = part(gradient, group).clone()
        optimizer.step()
    pairs = zip(parts, dense, strict=True)
    return max((mine.detach() - part(full, group)).abs().max().item() for mine, full in pairs if mine.numel())
