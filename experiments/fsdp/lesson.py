"""Fully sharded data parallelism (ZeRO-3): torchrun --nproc-per-node 3 lesson.py"""

import gc
from copy import deepcopy
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn


class Unit:  # the P parameters of a layer as one vector of N chunks, c = ceil(P/N), of which each rank keeps one
    def __init__(self, layer: nn.Module, group: dist.ProcessGroup) -> None:
        self.group, self.layer, self.parameters = group, layer, list(layer.parameters())
        sizes = [parameter.numel() for parameter in self.parameters]
        self.padding = self.parameters[0].new_zeros(-sum(sizes) % group.size())  # makes all chunks equal
        self.whole = self.flat([parameter.detach() for parameter in self.parameters])  # [N·c]
        self.shard = nn.Parameter(self.whole.chunk(group.size())[group.rank()].clone())  # [c]: the optimizer steps it
        for parameter, piece in zip(self.parameters, self.whole.split([*sizes, len(self.padding)]), strict=False):
            parameter.data = piece.view_as(parameter)
        layer.forward = partial(GatheredLayer.apply, layer.forward, self, self.shard)
        self.free()

    def flat(self, tensors: list[Tensor]) -> Tensor:
        return torch.cat([*(each.flatten() for each in tensors), self.padding])

    def gather(self) -> None:  # all chunks to all ranks: each sends (N-1)/N of the layer's bytes
        self.whole.untyped_storage().resize_(self.whole.nbytes)
        dist.all_gather(list(self.whole.chunk(self.group.size())), self.shard.detach(), group=self.group)

    def free(self) -> None:  # frees the memory; the parameters stay views of it
        self.whole.untyped_storage().resize_(0)

    def reduce_scatter(self) -> Tensor:  # this rank's chunk [c] of the summed gradients: as many bytes
        flat = self.flat([parameter.grad for parameter in self.parameters])  # [N·c]
        self.layer.zero_grad()
        dist.all_to_all_single(received := torch.empty_like(flat), flat, group=self.group)  # chunk r of all to rank r
        return received.view(self.group.size(), -1).sum(0)


class GatheredLayer(torch.autograd.Function):  # a layer as a function of a shard: its gradient is a sum over ranks
    @staticmethod
    def forward(ctx, layer, unit: Unit, shard: Tensor, inputs: Tensor) -> Tensor:
        ctx.layer, ctx.unit = layer, unit
        ctx.save_for_backward(inputs)  # and nothing else: the layer is recomputed
        unit.gather()
        outputs = layer(inputs)
        unit.free()
        return outputs

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[None, None, Tensor, Tensor]:
        inputs = ctx.saved_tensors[0].detach().requires_grad_(ctx.needs_input_grad[3])
        ctx.unit.gather()
        with torch.enable_grad():
            ctx.layer(inputs).backward(gradient)
        shard = ctx.unit.reduce_scatter()
        ctx.unit.free()
        return None, None, shard, inputs.grad


def demo(group: dist.ProcessGroup) -> float:
    """Train two steps on 11 samples [11, 5] split over the ranks; return the largest error of the outputs."""
    torch.manual_seed(1)  # the same weights on all ranks
    (inputs, targets), mine = torch.randn(2, 11, 5).double(), slice(group.rank(), None, group.size())
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 5)).double()
    alone, shards = deepcopy(model), [Unit(layer, group).shard for layer in (model[0], model[2])]
    for net, part, parameters in [(model, mine, shards), (alone, slice(11), list(alone.parameters()))] * 2:
        (net(inputs[part]) - targets[part]).square().sum().backward()
        for parameter in parameters:
            parameter.data -= 0.01 * parameter.grad
            parameter.grad = None
    return (model(inputs) - alone(inputs)).abs().max().item()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    print(f"rank {dist.get_rank()}: outputs differ from one process's by {demo(dist.group.WORLD):.0e} at most")
    gc.collect()  # units and layers refer to each other; a group must not be used by them after its end
    dist.destroy_process_group()
