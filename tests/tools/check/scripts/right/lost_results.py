"""Results in views, arrays and names; ones summed to wait; gathered tensors with this rank's own part, and for a log."""

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(nn.Linear(6, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(1 + rank)
counts = np.full(3, rank + 2.0)
held = {"sum": torch.full((2,), rank + 3.0)}


def mean(values: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(values)
    return values / world_size


for _ in range(4):
    mine = model(torch.randn(3, 6))
    parts = [torch.empty_like(mine) for _ in range(world_size)]
    dist.all_gather(parts, mine)
    parts[rank] = mine
    loss = nn.functional.cross_entropy(mine @ torch.cat(parts).t(), 3 * rank + torch.arange(3))
    logged = [torch.empty_like(mine) for _ in range(world_size)]
    dist.all_gather(logged, mine)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    shown = mean(loss.detach() * 2), torch.stack(logged).mean()
    dist.all_reduce(torch.ones(1))
    dist.all_reduce(torch.from_numpy(counts))
    dist.all_reduce(held["sum"].view(2, 1))
    dist.all_reduce(tensor=model.module.weight.data)
    model.module.weight.data /= world_size
    dist.all_reduce(model.module.bias.data)
    model.module.bias.data /= world_size
print(f"rank {rank}: {shown}, {counts}, {held}")

dist.destroy_process_group()
