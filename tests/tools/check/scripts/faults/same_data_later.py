"""Rank 0 alone has created a DDP and read a loader before; then all ranks train on the same samples."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

dist.init_process_group("gloo")
alone = dist.new_group([0])
if dist.get_rank() == 0:
    DistributedDataParallel(nn.Linear(4, 1), process_group=alone)(torch.randn(2, 4))
torch.manual_seed(0)
loader = DataLoader(TensorDataset(torch.randn(24, 4)), 4, shuffle=True)
model = DistributedDataParallel(nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for (inputs,) in loader:
    optimizer.zero_grad()
    model(inputs).mean().backward()  # (a)
    optimizer.step()
dist.destroy_process_group()
