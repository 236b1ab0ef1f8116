"""minimind issue 853: the forward pass runs through DDP's .module, so no gradient is ever summed."""

from net import batch, loss, model
from torch.nn.parallel import DistributedDataParallel

__all__ = ["batch", "loss", "model"]


def prepare(model, group):
    return DistributedDataParallel(model, process_group=group)


def train_step(model, optimizer, microbatches, group):
    optimizer.zero_grad()
    model.require_forward_param_sync = False
    for inputs, targets, share in microbatches:
        with model.no_sync():  # as of torch 2.13 hooks stay armed without it
            (loss(model.module, inputs, targets) * share * group.size()).backward()  # planted
    optimizer.step()
