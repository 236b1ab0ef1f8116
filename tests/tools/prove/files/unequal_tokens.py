"""transformers pull request 34191: each microbatch's mean is divided by the number of microbatches, whatever its tokens."""

from axes import sum_gradients
from net import PADDING, batch, loss, model

__all__ = ["batch", "loss", "model"]


def train_step(model, optimizer, microbatches, group):
    optimizer.zero_grad()
    for inputs, targets, _ in microbatches:
        mean = loss(model, inputs, targets) / (targets != PADDING).sum()
        (mean / len(microbatches) / group.size()).backward()  # planted
    sum_gradients(model, group)
    optimizer.step()
