"""Embeddings are compared with those of all ranks, which all_gather has copied: half of the gradient is missing."""

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(nn.Linear(6, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(1 + rank)
for _ in range(2):
    mine = model(torch.randn(3, 6))
    parts = [torch.empty_like(mine) for _ in range(world_size)]
    dist.all_gather(parts, mine)  # (a)
    scores = mine @ torch.cat(parts).t()
    loss = nn.functional.cross_entropy(scores, 3 * rank + torch.arange(3))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"rank {rank}: {loss.item()}")

dist.destroy_process_group()
