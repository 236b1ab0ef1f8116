"""Tensor and pipeline parallelism by hand, for the blocks of net.py."""

from typing import Any

import torch
import torch.distributed as dist
from net import LENGTH, WIDTH, Block, loss
from torch import Tensor, nn
from torch.nn import functional as F


class Copy(torch.autograd.Function):
    """The identity forward, a sum over the group backward (Megatron-LM's f)."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class Sum(torch.autograd.Function):
    """A sum over the group forward, the identity backward (Megatron-LM's g)."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, group: dist.ProcessGroup) -> Tensor:
        hidden = hidden.clone()
        dist.all_reduce(hidden, group=group)
        return hidden

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class Column(nn.Module):
    """Some of a linear layer's outputs."""

    def __init__(self, whole: nn.Linear, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group = group
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        self.weight = nn.Parameter(whole.weight.tensor_split(size)[rank].detach().clone())
        self.bias = nn.Parameter(whole.bias.tensor_split(size)[rank].detach().clone())

    def forward(self, hidden: Tensor) -> Tensor:
        return F.linear(Copy.apply(hidden, self.group), self.weight, self.bias)


class Row(nn.Module):
    """Some of a linear layer's inputs; the bias is added once, after the sum."""

    def __init__(self, whole: nn.Linear, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group = group
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        self.weight = nn.Parameter(whole.weight.tensor_split(size, dim=1)[rank].detach().clone())
        self.bias = nn.Parameter(whole.bias.detach().clone())

    def forward(self, hidden: Tensor) -> Tensor:
        found: Tensor = Sum.apply(F.linear(hidden, self.weight), self.group)
        return found + self.bias


def cut(model: nn.Module, group: dist.ProcessGroup, row: type[nn.Module] = Row) -> nn.Module:
    """All blocks over the ranks of `group`."""
    for layer in model.layers:
        if isinstance(layer, Block):
            layer.up = Column(layer.up, group)
            layer.down = row(layer.down, group)
    return model


def stage(model: nn.Module, group: dist.ProcessGroup) -> nn.Module:
    """This rank's run of layers; the others are not there."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    mine = torch.arange(len(model.layers)).tensor_split(size)[rank].tolist()
    for index in range(len(model.layers)):
        if index not in mine:
            model.layers[index] = nn.Identity()
    return model


def backward(model: nn.Module, microbatches: list[Any], group: dist.ProcessGroup) -> float | None:
    """Forward and backward of all microbatches through the stages, one after the other."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    before, behind = (dist.get_global_rank(group, each % size) for each in (rank - 1, rank + 1))
    total = 0.0
    for inputs, targets, share in microbatches:
        given = inputs
        if rank > 0:
            given = torch.empty(len(inputs), LENGTH, WIDTH, dtype=torch.float64)
            dist.recv(given, before, group=group)
            given.requires_grad_()
        if rank == size - 1:
            found = loss(lambda _, given=given: model(given), given, targets) * share
            found.backward()
            total += found.item()
        else:
            hidden = model(given)
            dist.send(hidden.detach().contiguous(), behind, group=group)
            gradient = torch.empty_like(hidden)
            dist.recv(gradient, behind, group=group)
            hidden.backward(gradient)
        if rank > 0:
            assert given.grad is not None
            dist.send(given.grad, before, group=group)
    return total if rank == size - 1 else None


def sum_gradients(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Over the ranks of `group`."""
    for parameter in model.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        dist.all_reduce(parameter.grad, group=group)
