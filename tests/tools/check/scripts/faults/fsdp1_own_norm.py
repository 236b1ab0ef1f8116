"""Gradients of the older FSDP wrapper are clipped by torch.nn.utils, which sees only this rank's shard."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = FullyShardedDataParallel(nn.Linear(7, 3), device_id=torch.device("cpu"), use_orig_params=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
torch.manual_seed(1 + rank)
for _ in range(2):
    loss = model(torch.randn(5, 7)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)  # (a)
    optimizer.step()
print(f"rank {rank}: {loss.item()}")

dist.destroy_process_group()
