"""Rank 1 sums in the pair of ranks 0 and 1, the others sum in the whole world."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
pair = dist.new_group([0, 1])

total = torch.ones(4)
dist.all_reduce(total)
if rank == 1:
    dist.all_reduce(total, group=pair)  # (b)
else:
    dist.all_reduce(total)  # (a)
print(f"rank {rank}: {total.tolist()}")

dist.destroy_process_group()
