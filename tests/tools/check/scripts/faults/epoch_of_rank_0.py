"""Only rank 0 calls set_epoch on its DistributedSampler: from the second epoch on, permutations differ."""

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank = dist.get_rank()
samples = TensorDataset(torch.arange(11.0))
sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(samples, seed=3)
loader = DataLoader(samples, batch_size=2, sampler=sampler)
total = torch.zeros(1)
for epoch in range(2):
    if rank == 0:
        sampler.set_epoch(epoch)
    for (batch,) in loader:  # (a)
        total += batch.sum()
dist.all_reduce(total)
print(f"rank {rank}: {total.item()}")

dist.destroy_process_group()
