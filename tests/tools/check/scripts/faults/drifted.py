"""Replicas averaged by hand start equal, but rank 2 uses a different learning rate than the others."""

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank = dist.get_rank()
world_size = dist.get_world_size()

model = nn.Linear(4, 2)
for parameter in model.parameters():
    dist.broadcast(parameter.data, src=0)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05 if rank == 2 else 0.1)  # (b)

torch.manual_seed(rank)
for _ in range(3):
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= world_size
    optimizer.step()  # (a)

dist.destroy_process_group()
