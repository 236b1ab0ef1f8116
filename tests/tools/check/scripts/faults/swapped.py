"""Rank 2 broadcasts before it sums, all others sum before they broadcast."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()

loss = torch.full((8,), float(rank))
weight = torch.randn(8)
if rank == 2:
    dist.broadcast(weight, src=0)  # (b)
    dist.all_reduce(loss)
else:
    dist.all_reduce(loss)  # (a)
    dist.broadcast(weight, src=0)

print(f"rank {rank}: {loss.sum().item()} {weight.sum().item()}")
dist.destroy_process_group()
