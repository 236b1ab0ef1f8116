"""Gradients are averaged at the first of three microbatches, and the others are added to the average."""

import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

torch.manual_seed(1 + dist.get_rank())
for _ in range(3):
    optimizer.zero_grad()
    for microbatch in range(3):
        with model.no_sync() if microbatch else contextlib.nullcontext():
            model(torch.randn(8, 4)).square().mean().backward()  # (a)
    optimizer.step()  # (b)

dist.destroy_process_group()
