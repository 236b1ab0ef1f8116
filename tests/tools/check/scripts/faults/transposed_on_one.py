"""A gradient is summed, but rank 1 has it transposed in memory: different elements are added to each other."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
gradient = torch.arange(12.0).reshape(3, 4)
if rank == 1:
    gradient = gradient.t().contiguous().t()
dist.reduce(gradient, dst=0)  # (a)
print(f"rank {rank}: {gradient.tolist()}")

dist.destroy_process_group()
