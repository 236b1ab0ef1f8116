"""Gossip: four ranks begin equal and average their gradients in changing pairs, so that all of them differ later."""

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
pairings = [[(0, 1), (2, 3)], [(0, 2), (1, 3)]]
groups = [[(pair, dist.new_group(list(pair))) for pair in pairing] for pairing in pairings]
torch.manual_seed(0)
model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

torch.manual_seed(1 + rank)
for step in range(5):
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    group = next(group for pair, group in groups[step % 2] if rank in pair)
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad, group=group)
            parameter.grad /= 2
    optimizer.step()

dist.destroy_process_group()
