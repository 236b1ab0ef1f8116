"""Every rank splits the data set with its own seed, and trains on its part of its own training set."""

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, random_split

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)
training, held_out = random_split(TensorDataset(torch.arange(20.0)), [15, 5])
total = torch.zeros(1)
for (batch,) in DataLoader(training, batch_size=4, sampler=DistributedSampler(training)):  # (a)
    total += batch.sum()
dist.all_reduce(total)
print(f"rank {rank}: {total.item()}, held out {len(held_out)}")

dist.destroy_process_group()
