"""Three typical wrong answers to puzzle 13, and why each is refused."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

REFUSED = {
    1: r"weight.grad on rank 0 differs from one process: it is None",
    2: r"weight.grad on rank 0 .* it is the gradient of the last microbatch alone",
    3: r"waits? .*13_pipeline_step.py",
}
Loss = Callable[[Tensor, int], Tensor]
Shapes = list[tuple[int, int]]


class Stage:
    """One stage's forward and backward passes."""

    def __init__(self, stage: torch.nn.Module, inputs: list[Tensor], loss: Loss, shapes: Shapes, group) -> None:
        self.stage, self.inputs, self.loss, self.shapes, self.group = stage, inputs, loss, shapes, group
        self.rank, self.last = group.rank(), group.size() - 1
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}

    def forward(self, number: int) -> None:
        x = self.inputs[number] if self.rank == 0 else torch.empty(self.shapes[number], dtype=torch.float64)
        if self.rank > 0:
            dist.recv(x, group_src=self.rank - 1, group=self.group)
            x.requires_grad_()
        output = self.stage(x)
        if self.rank < self.last:
            dist.send(output.detach(), group_dst=self.rank + 1, group=self.group)
        self.kept[number] = x, output

    def backward(self, number: int) -> None:
        x, output = self.kept[number]
        if self.rank == self.last:
            self.loss(output, number).backward()
        else:
            gradient = torch.empty_like(output)
            dist.recv(gradient, group_src=self.rank + 1, group=self.group)
            output.backward(gradient)
        if self.rank > 0:
            dist.send(x.grad, group_dst=self.rank - 1, group=self.group)


def pipeline_step_1(stage: torch.nn.Module, inputs: list[Tensor], loss: Loss, shapes: Shapes, group) -> None:
    """The backward pass stops at the last stage."""
    here = Stage(stage, inputs, loss, shapes, group)
    for number in range(len(shapes)):
        here.forward(number)
        if here.rank == here.last:
            loss(here.kept[number][1], number).backward()


def pipeline_step_2(stage: torch.nn.Module, inputs: list[Tensor], loss: Loss, shapes: Shapes, group) -> None:
    """The gradients of a microbatch replace the earlier ones."""
    here = Stage(stage, inputs, loss, shapes, group)
    for number in range(len(shapes)):
        here.forward(number)
    for number in range(len(shapes)):
        stage.zero_grad()
        here.backward(number)


def pipeline_step_3(stage: torch.nn.Module, inputs: list[Tensor], loss: Loss, shapes: Shapes, group) -> None:
    """1F1B with blocking sends: a stage sends forward while the next one sends back, and neither receives."""
    here = Stage(stage, inputs, loss, shapes, group)
    warm_up = min(here.last - here.rank, len(shapes))
    for number in range(warm_up):
        here.forward(number)
    for number in range(warm_up, len(shapes)):
        here.forward(number)
        here.backward(number - warm_up)
    for number in range(len(shapes) - warm_up, len(shapes)):
        here.backward(number)
