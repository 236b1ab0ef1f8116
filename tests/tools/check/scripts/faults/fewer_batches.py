"""Rank 1 has two batches where rank 0 has three, under DDP and without join()."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
dist.init_process_group("gloo")
rank = dist.get_rank()

samples = torch.randn(10, 4)
mine = samples[:6] if rank == 0 else samples[6:]
loader = DataLoader(TensorDataset(mine, mine.sum(1, keepdim=True)), batch_size=2)
model = DistributedDataParallel(nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

for inputs, targets in loader:
    loss = nn.functional.mse_loss(model(inputs), targets)
    optimizer.zero_grad()
    loss.backward()  # (a)
    optimizer.step()

dist.barrier()  # (b)
dist.destroy_process_group()
