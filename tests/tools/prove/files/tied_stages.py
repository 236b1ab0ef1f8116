"""Megatron-LM issue 656 and others: tied embedding and head are on two stages, and each uses its own gradient."""

import torch
from axes import backward, stage
from net import Net, batch, loss

__all__ = ["batch", "loss"]
mesh = {"pp": 2}


def model(seed):
    torch.manual_seed(seed)
    return Net(tied=True)


def prepare(model, mesh):
    return stage(model, mesh.get_group("pp"))


def train_step(model, optimizer, microbatches, mesh):
    optimizer.zero_grad()
    backward(model, microbatches, mesh.get_group("pp"))
    optimizer.step()  # planted
