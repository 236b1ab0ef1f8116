"""A model alone: tied, with dropout, an unused layer and buffers, of which three change; the rest is the lab's."""

import torch
from net import Net
from net import batch as batch
from torch import nn


class Counting(Net):
    """Carries a mask, and counts the tokens that it sees."""

    def __init__(self):
        super().__init__(blocks=1, dropout=0.1, tied=True)
        self.spare = nn.Linear(3, 3)
        self.register_buffer("mask", torch.full((5,), float("-inf")))
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))
        self.register_buffer("average", torch.zeros(3))

    def forward(self, tokens):
        self.seen += tokens.numel()
        self.passes += 1
        return super().forward(tokens)


def after_step(model):
    model.average.lerp_(model.layers[1].norm.weight[:3], 0.1)


def model(seed):
    torch.manual_seed(seed)
    return Counting()
