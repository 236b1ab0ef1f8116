"""SkyRL issue 1709: ranks whose model was built on the meta device get rank 0's weights, but no rotary frequencies."""

import torch
import torch.distributed as dist
from net import Net, batch, loss
from torch import nn
from torch.distributed.fsdp import fully_shard

__all__ = ["batch", "loss"]


class Turned(Net):
    """Each position's hidden state turned, as rotary embeddings do."""

    def __init__(self):
        super().__init__()
        self.register_buffer("frequencies", torch.tensor([1.0, 0.1, 0.01]), persistent=False)

    def forward(self, tokens):
        hidden = self.layers[0](tokens)
        angles = torch.arange(tokens.shape[1], dtype=hidden.dtype)[:, None] * self.frequencies
        real, imaginary = hidden.chunk(2, -1)
        turned = real * angles.cos() - imaginary * angles.sin(), real * angles.sin() + imaginary * angles.cos()
        hidden = torch.cat(turned, -1)
        for layer in self.layers[1:]:
            hidden = layer(hidden)
        return hidden


def model(seed):
    torch.manual_seed(seed)
    return Turned()


def prepare(model, group):
    if group.rank():
        model.to_empty(device="cpu")
        nn.init.zeros_(model.frequencies)  # what memory may hold, the same each time
    for tensor in model.state_dict().values():  # planted: which has no buffer that is not persistent
        dist.broadcast(tensor, src=0, group=group)
    return fully_shard(model)


def train_step(model, optimizer, microbatches, group):
    optimizer.zero_grad()
    total = 0.0
    for inputs, targets, share in microbatches:
        part = loss(model, inputs, targets) * share
        (part * group.size()).backward()
        total += part.item()
    optimizer.step()
    return total
