"""Rank 2 takes the maximum where the others take the sum."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()

values = torch.full((4,), float(rank + 1))
if rank == 2:
    dist.all_reduce(values, op=dist.ReduceOp.MAX)  # (b)
else:
    dist.all_reduce(values, op=dist.ReduceOp.SUM)  # (a)
print(f"rank {rank}: {values.tolist()}")

dist.destroy_process_group()
