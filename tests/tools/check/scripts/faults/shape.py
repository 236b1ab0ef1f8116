"""Rank 1 sums 900 values where the others sum 1000."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()

lengths = [1000, 900, 1000]
counts = torch.ones(lengths[rank])
dist.all_reduce(counts)  # (a)
print(f"rank {rank}: {counts.sum().item()}")

dist.destroy_process_group()
