"""Replicas, stages and slices on one grid: torchrun --nproc-per-node 4 lesson.py"""

import math
from collections import deque
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F


def grid(sizes: dict[str, int]) -> dict[str, dist.ProcessGroup]:
    """Returns this rank's group along each axis: ranks that differ only along it. The last axis is innermost."""
    ranks, groups = torch.arange(math.prod(sizes.values())).view(*sizes.values()), {}
    for dim, (axis, size) in enumerate(sizes.items()):
        for row in ranks.movedim(dim, -1).reshape(-1, size).tolist():
            group = dist.new_group(row)  # every rank creates every group, in one order
            if dist.get_rank() in row:
                groups[axis] = group
    return groups


class SumOneWay(torch.autograd.Function):  # tp (experiments/tp/lesson.py): f sums gradients, and g sums outputs
    @staticmethod
    def forward(ctx, x: Tensor, group: dist.ProcessGroup, is_g: bool) -> Tensor:
        ctx.group, ctx.is_g, x = group, is_g, x.clone()
        if is_g:
            dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None]:
        gradient = gradient.clone()
        if not ctx.is_g:
            dist.all_reduce(gradient, group=ctx.group)
        return gradient, None, None


def slice_layers(block: nn.Module, columns: list[str], row: str, group: dist.ProcessGroup, unit: int = 1) -> None:
    """Replaces layers of `block` by this rank's slices: `columns` get its input, and `row` gets their output."""

    def local_slice(weight: Tensor, dim: int) -> nn.Parameter:
        units = weight.detach().unflatten(dim, (-1, unit))
        return nn.Parameter(units.tensor_split(group.size(), dim)[group.rank()].flatten(dim, dim + 1).clone())

    for layer in (getattr(block, name) for name in columns):
        layer.weight, layer.bias = local_slice(layer.weight, 0), local_slice(layer.bias, 0)
    last = getattr(block, row)
    last.weight = local_slice(last.weight, 1)
    last.forward = lambda x: SumOneWay.apply(F.linear(x, last.weight), group, True) + last.bias
    block.register_forward_pre_hook(lambda _, inputs: SumOneWay.apply(inputs[0], group, False))


class Pipeline:  # pp (experiments/pp/lesson.py): sliced layers on each rank, the same samples on all
    def __init__(self, stage: nn.Module, loss: Callable, between: tuple[int, ...], stages: dist.ProcessGroup) -> None:
        self.stage, self.loss, self.between, self.stages = stage, loss, between, stages
        self.rank, self.last = stages.rank(), stages.size() - 1

    def step(self, microbatches: list[tuple[Tensor, Tensor, float]], replicas: dist.ProcessGroup) -> Tensor | None:
        self.saved, sent, total, batch = deque(), [], 0.0, iter(microbatches)
        ahead = min(self.last - self.rank, len(microbatches))
        for forward in [True] * ahead + [True, False] * (len(microbatches) - ahead) + [False] * ahead:
            if forward:
                inputs, targets, share = next(batch)
                hidden = self.receive(self.rank - 1, len(inputs)).requires_grad_() if self.rank else inputs
                output = self.stage(hidden)
                if self.rank < self.last:
                    sent.append(dist.isend(output.detach(), group=self.stages, group_dst=self.rank + 1))
                else:
                    output = self.loss(output, targets) * share
                    total = total + output.detach()
                self.saved.append((hidden, output))
            else:
                hidden, output = self.saved.popleft()
                gradient = self.receive(self.rank + 1, len(output)) if self.rank < self.last else None
                torch.autograd.backward(output, gradient)
                if self.rank:
                    sent.append(dist.isend(hidden.grad, group=self.stages, group_dst=self.rank - 1))
        for work in sent:
            work.wait()
        for parameter in self.stage.parameters() if replicas.size() > 1 else ():  # dp: over its replicas
            dist.all_reduce(parameter.grad, group=replicas)
        return total if self.rank == self.last else None

    def receive(self, rank: int, samples: int) -> Tensor:
        buffer = next(self.stage.parameters()).new_empty(samples, *self.between)
        dist.recv(buffer, group=self.stages, group_src=rank)
        return buffer


def demo(group: dist.ProcessGroup) -> float:
    """Train four blocks on three grids of an even number of ranks; return the largest error of a gradient."""
    half, worst, loss = group.size() // 2, 0.0, nn.MSELoss(reduction="sum")
    for pp, dp, tp in ((2, half, 1), (2, 1, half), (1, 2, half)):
        axes = grid({"pp": pp, "dp": dp, "tp": tp})
        torch.manual_seed(1)  # the same weights on all ranks
        model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)) for _ in range(4))).double()
        inputs, targets = torch.randn(2, 12, 4).double()
        (loss(model(inputs), targets) / 12).backward()
        stage = model[axes["pp"].rank() * 4 // pp :][: 4 // pp]
        wanted = [block[0].weight.grad.tensor_split(tp)[axes["tp"].rank()] for block in stage]
        for block in stage:
            slice_layers(block, ["0"], "2", axes["tp"])
        stage.zero_grad()
        batch = [(inputs[i], targets[i], 1 / 12) for i in torch.arange(12)[axes["dp"].rank() :: dp].split(2)]
        Pipeline(stage, loss, (4,), axes["pp"]).step(batch, axes["dp"])
        worst = max(worst, *((b[0].weight.grad - g).abs().max().item() for b, g in zip(stage, wanted, strict=True)))
    return worst


if __name__ == "__main__":
    dist.init_process_group("gloo")
    print(f"rank {dist.get_rank()}: gradients differ from one process's by {demo(dist.group.WORLD):.0e} at most")
    dist.destroy_process_group()
