"""Rank 1 alone changes the bias after DDP was created, and the replicas differ from then on."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

torch.manual_seed(0)
dist.init_process_group("gloo")
rank = dist.get_rank()
model = DistributedDataParallel(nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

if rank == 1:
    nn.init.constant_(model.module.bias, 0.5)  # (b)

torch.manual_seed(1 + rank)
for _ in range(3):
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()  # (a)

dist.destroy_process_group()
