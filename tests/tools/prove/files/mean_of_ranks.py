"""transformers issue 34242, of the same family: DDP averages means of ranks with different numbers of tokens."""

from net import PADDING, batch, loss, model
from torch.nn.parallel import DistributedDataParallel

__all__ = ["batch", "loss", "model"]


def prepare(model, group):
    return DistributedDataParallel(model, process_group=group)


def train_step(model, optimizer, microbatches, group):
    optimizer.zero_grad()
    terms = sum((targets != PADDING).sum() for _, targets, _ in microbatches)
    for index, (inputs, targets, _) in enumerate(microbatches):
        model.require_backward_grad_sync = index == len(microbatches) - 1
        (loss(model, inputs, targets) / terms).backward()  # planted
    optimizer.step()
