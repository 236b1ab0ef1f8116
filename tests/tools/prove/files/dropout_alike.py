"""transformers issue 31412: one seed for all ranks, so each drops the same units for different samples."""

import torch
from axes import sum_gradients
from net import Net, batch, loss

__all__ = ["batch", "loss"]


def model(seed):
    torch.manual_seed(seed)
    return Net(dropout=0.1)


def prepare(model, group):
    torch.manual_seed(40)  # planted
    return model


def train_step(model, optimizer, microbatches, group):
    optimizer.zero_grad()
    for inputs, targets, share in microbatches:
        (loss(model, inputs, targets) * share).backward()
    sum_gradients(model, group)
    optimizer.step()
