"""Rank 1 sums a matrix of shape (2, 3), rank 0 one of shape (3, 2): equally many elements, in a different order."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()

weight = torch.arange(6.0).reshape(3, 2)
if rank == 1:
    weight = weight.t().contiguous()
dist.all_reduce(weight)  # (a)
print(f"rank {rank}: {weight.tolist()}")

dist.destroy_process_group()
