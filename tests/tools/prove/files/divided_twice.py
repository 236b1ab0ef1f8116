"""accelerate issue 3533: both the trainer and the library divide by the number of accumulated microbatches."""

from axes import sum_gradients
from net import batch, loss, model

__all__ = ["batch", "loss", "model"]


def train_step(model, optimizer, microbatches, group):
    optimizer.zero_grad()
    for inputs, targets, share in microbatches:
        (
            loss(model, inputs, targets) * share / len(microbatches)
        ).backward()  # planted: the share is of the whole batch
    sum_gradients(model, group)
    optimizer.step()
