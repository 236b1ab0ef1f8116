"""A model, a loss and a training step of your own: three names that the lab reads from a file.

distlab prove mine/own.py                                                    are N ranks one process?
RUN_MODE=fsdp LAB_MODEL=mine/own.py:model make run                           the model in a mode
LAB_MODEL=mine/own.py:model LAB_VARIANT=ddp,mine/own.py:train_step make run  the step beside PyTorch's
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

WIDTH = 24


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 40), nn.Linear(40, WIDTH)

    def forward(self, hidden):
        return hidden + self.down(torch.tanh(self.up(self.norm(hidden))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Embedding(256, WIDTH), Block(), Block(), nn.Linear(WIDTH, 256)])

    def forward(self, tokens):
        for layer in self.layers:
            tokens = layer(tokens)
        return tokens


def model(seed):
    torch.manual_seed(seed)
    return Net()


def loss(model, inputs, targets):
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), reduction="sum")


def train_step(model, optimizer, microbatches, group):
    """All gradients in one message: for small models latency counts, not bandwidth."""
    optimizer.zero_grad()
    total = 0.0
    for inputs, targets, share in microbatches:
        part = loss(model, inputs, targets) * share
        part.backward()
        total += part.item()
    parameters = list(model.parameters())
    flat = torch.cat([parameter.grad.flatten() for parameter in parameters])
    dist.all_reduce(flat, group=group)
    for parameter, summed in zip(parameters, flat.split([each.numel() for each in parameters]), strict=True):
        parameter.grad.copy_(summed.view_as(parameter))
    optimizer.step()
    return total
