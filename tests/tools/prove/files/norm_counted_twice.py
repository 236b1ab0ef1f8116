"""NeMo-RL pull request 3788: under tensor parallelism the norm counts replicated parameters once per rank."""

import torch.distributed as dist
from axes import cut
from net import batch, loss, model

__all__ = ["batch", "loss", "model"]
mesh = {"tp": -1}
clip = 0.1


def prepare(model, mesh):
    return cut(model, mesh.get_group("tp"))


def train_step(model, optimizer, microbatches, mesh):
    optimizer.zero_grad()
    for inputs, targets, share in microbatches:
        (loss(model, inputs, targets) * share).backward()
    square = sum(parameter.grad.square().sum() for parameter in model.parameters())
    dist.all_reduce(square, group=mesh.get_group("tp"))  # planted
    for parameter in model.parameters():
        parameter.grad.mul_(min(1.0, clip / square.sqrt().item()))
    optimizer.step()
