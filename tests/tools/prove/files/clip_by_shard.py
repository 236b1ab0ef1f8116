"""The error that FSDP's documentation of clip_grad_norm_ warns of: each rank clips by the norm of its own shards."""

import torch
from net import batch, loss, model
from right_fsdp2 import prepare

__all__ = ["batch", "loss", "model", "prepare"]
clip = 0.1


def train_step(model, optimizer, microbatches, group):
    optimizer.zero_grad()
    for inputs, targets, share in microbatches:
        (loss(model, inputs, targets) * share * group.size()).backward()
    shards = [parameter.grad.to_local() for parameter in model.parameters()]
    norm = torch.stack([shard.norm() for shard in shards]).norm()
    for shard in shards:
        shard.mul_(min(1.0, clip / norm.item()))  # planted
    optimizer.step()
