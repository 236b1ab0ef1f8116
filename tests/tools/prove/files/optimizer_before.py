"""PyTorch issue 149205: the optimizer has the old parameters, which are not trained any more."""

import torch
from axes import sum_gradients
from net import batch, loss, model

__all__ = ["batch", "loss", "model"]


def train_step(model, optimizer, microbatches, group):
    if not hasattr(model, "kept"):
        head = model.layers[-1].score
        head.weight = torch.nn.Parameter(head.weight.detach().clone())  # planted: the optimizer has the one of before
        model.kept = True
    model.zero_grad()
    for inputs, targets, share in microbatches:
        (loss(model, inputs, targets) * share).backward()
    sum_gradients(model, group)
    optimizer.step()
