"""Tensor parallelism (Megatron-LM): torchrun --nproc-per-node 3 lesson.py"""

from copy import deepcopy

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F


class Copy(torch.autograd.Function):  # f: every rank's slice takes all of x, so each has a part of x's gradient
    @staticmethod
    def forward(ctx, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        dist.all_reduce(total := gradient.contiguous(), group=ctx.group)  # [B, S, D]: 2(t-1)/t of its bytes
        return total, None


class Reduce(torch.autograd.Function):  # g: every rank has a part of each output; after it all compute the same loss
    @staticmethod
    def forward(ctx, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        ctx.mark_dirty(part)
        dist.all_reduce(part, group=group)  # [B, S, D]
        return part

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None  # every rank has all of it already


def local_slice(whole: Tensor, dim: int, unit: int, group: dist.ProcessGroup) -> nn.Parameter:
    """This rank's part of a weight along `dim`, in units that are not cut: a row, or the rows of an attention head."""
    units = whole.detach().unflatten(dim, (-1, unit))
    return nn.Parameter(units.tensor_split(group.size(), dim)[group.rank()].flatten(dim, dim + 1).clone())


def column_parallel(layer: nn.Linear, group: dist.ProcessGroup, unit: int) -> None:
    """[..., D] to this rank's outputs [..., D_out/t]: columns of A in the paper's x·A, rows of torch's weight."""
    layer.weight, layer.bias = (local_slice(each, 0, unit, group) for each in (layer.weight, layer.bias))


def row_parallel(layer: nn.Linear, group: dist.ProcessGroup, unit: int) -> None:
    """This rank's inputs [..., D_in/t] to all outputs [..., D]; the bias is added once, after the sum."""
    layer.weight = local_slice(layer.weight, 1, unit, group)  # [D, D_in/t]
    layer.forward = lambda x: Reduce.apply(F.linear(x, layer.weight), group) + layer.bias


def slice_layers(block: nn.Module, columns: list[str], row: str, group: dist.ProcessGroup, unit: int = 1) -> None:
    """Replaces layers of `block` by this rank's slices: `columns` get its input, and `row` gets their output."""
    for name in columns:
        column_parallel(getattr(block, name), group, unit)
    row_parallel(getattr(block, row), group, unit)
    block.register_forward_pre_hook(lambda _, inputs: Copy.apply(inputs[0], group))  # once for all layers that take it


def demo(group: dist.ProcessGroup) -> float:
    """Run two MLPs without residuals; return the largest gradient error against one process."""
    torch.manual_seed(1)  # the same weights, and the same samples, on all ranks
    dense, inputs = nn.Sequential(), torch.randn(3, 4).double()  # [B, D]
    for _ in range(2):
        dense.append(nn.Sequential(nn.Linear(4, 10), nn.Tanh(), nn.Linear(10, 4)).double())
    for block in (sliced := deepcopy(dense)):
        slice_layers(block, ["0"], "2", group)
    for net in (dense, sliced):
        net(inputs).square().sum().backward()
    expected = local_slice(dense[0][0].weight.grad, 0, 1, group)
    return (sliced[0][0].weight.grad - expected).abs().max().item()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    print(f"rank {dist.get_rank()}: gradients differ from one process's by {demo(dist.group.WORLD):.0e} at most")
    dist.destroy_process_group()
