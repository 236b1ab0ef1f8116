"""Megatron-LM issue 1012: gradients are summed over ranks before the last microbatch is computed."""

from axes import sum_gradients
from net import batch, loss, model

__all__ = ["batch", "loss", "model"]


def train_step(model, optimizer, microbatches, group):
    optimizer.zero_grad()
    for index, (inputs, targets, share) in enumerate(microbatches):
        if index == len(microbatches) - 1:
            sum_gradients(model, group)  # planted
        (loss(model, inputs, targets) * share).backward()
    optimizer.step()
