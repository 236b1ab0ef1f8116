"""fully_shard and a loader without a sampler: all ranks shuffle equally, and train on the same samples."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 1))
fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
x = torch.randn(24, 6)
for inputs, targets in DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=6, shuffle=True):
    loss = nn.functional.mse_loss(model(inputs), targets)  # (a)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"rank {rank}: {loss.item()}")

dist.destroy_process_group()
