"""Megatron-DeepSpeed pull request 276: tensor-parallel ranks have the same activations, but drop different ones."""

import torch
import torch.distributed as dist
from axes import cut
from net import Net, batch, loss

__all__ = ["batch", "loss"]
mesh = {"tp": 2}


def model(seed):
    torch.manual_seed(seed)
    return Net(dropout=0.1)


def prepare(model, mesh):
    torch.manual_seed(40 + dist.get_rank())  # planted
    return cut(model, mesh.get_group("tp"))


def train_step(model, optimizer, microbatches, mesh):
    optimizer.zero_grad()
    for inputs, targets, share in microbatches:
        (loss(model, inputs, targets) * share).backward()
    optimizer.step()
