"""Rank 2 skips the new_group of ranks 0 and 1, so that its next group has a different name than on the others."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()

left = torch.ones(4)
right = torch.ones(4)
if rank in (0, 1):
    first = dist.new_group([0, 1])  # (a)
    dist.all_reduce(left, group=first)

second = dist.new_group([1, 2])  # (b)
if rank in (1, 2):
    dist.all_reduce(right, group=second)

dist.barrier()
print(f"rank {rank}: {left.sum().item()} {right.sum().item()}")
dist.destroy_process_group()
