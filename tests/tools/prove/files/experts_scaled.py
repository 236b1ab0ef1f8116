"""PyTorch issue 160285: an expert's gradient has the samples of all ranks already, and is not divided as others are."""

import torch
import torch.distributed as dist
from net import VOCABULARY, WIDTH, Block, Head, loss
from torch import nn

__all__ = ["loss"]
even = True
EXPERTS = 4


class Experts(nn.Module):
    """Token t goes to expert t % 4; this rank's experts see the tokens of all ranks."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList([Block() for _ in range(EXPERTS)])
        self.mine = range(EXPERTS)
        self.group = None

    def forward(self, hidden):
        everywhere = hidden if self.group is None else gathered(hidden, self.group)
        found = torch.zeros_like(everywhere)
        for index in self.mine:
            token = torch.arange(hidden.shape[1]) % EXPERTS == index
            found = found + self.experts[index](everywhere) * token[:, None]
        return found if self.group is None else returned(found, self.group)


def gathered(hidden, group):
    return torch.cat(dist.nn.functional.all_gather(hidden.contiguous(), group=group))


def returned(found, group):
    parts = [each.contiguous() for each in found.chunk(group.size())]
    return dist.nn.functional.reduce_scatter(torch.empty_like(parts[0]), parts, group=group)


def model(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), Experts(), Head())


def batch(seed, step):
    draw = torch.Generator().manual_seed(1000 * seed + step)
    tokens = torch.randint(VOCABULARY, (8, 6), generator=draw)
    return tokens[:, :-1], tokens[:, 1:]


def prepare(model, group):
    layer = model[1]
    layer.group = group
    layer.mine = range(group.rank(), EXPERTS, group.size())
    for index in range(EXPERTS):
        if index not in layer.mine:
            layer.experts[index] = nn.Identity()
    return model


def train_step(model, optimizer, microbatches, group):
    optimizer.zero_grad()
    for inputs, targets, share in microbatches:
        (loss(model, inputs, targets) * share * group.size()).backward()
    for name, parameter in model.named_parameters():
        if "experts" not in name:  # planted: those are divided by nothing
            dist.all_reduce(parameter.grad, group=group)
            parameter.grad.div_(group.size())
    optimizer.step()
