"""Rank 1 calls barrier where the others call all_reduce."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()

loss = torch.tensor([float(rank)])
dist.all_reduce(loss)
if rank == 1:
    dist.barrier()  # (b)
else:
    dist.all_reduce(loss)  # (a)
print(f"rank {rank}: {loss.item()}")

dist.destroy_process_group()
