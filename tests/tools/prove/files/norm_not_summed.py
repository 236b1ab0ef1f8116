"""Megatron-LM issue 1446: under sequence parallelism the gradient of a norm covers one rank's tokens, and is never summed."""

import torch
import torch.distributed as dist
from net import LENGTH, batch, loss, model

__all__ = ["batch", "loss", "model"]
mesh = {"tp": 2}


def train_step(model, optimizer, microbatches, mesh):
    optimizer.zero_grad()
    rank, size = mesh.get_local_rank("tp"), mesh["tp"].size()
    mine = slice(LENGTH * rank // size, LENGTH * (rank + 1) // size)
    for inputs, targets, share in microbatches:
        (loss(model, inputs[:, mine], targets[:, mine]) * share).backward()
    for name, parameter in model.named_parameters():
        if not name.endswith("norm.weight"):  # planted
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad, group=mesh.get_group("tp"))
    optimizer.step()
