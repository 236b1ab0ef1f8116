"""Rank 0 sums in the pair first and in the trio after it, rank 1 the other way round: each waits for the other."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
pair = dist.new_group([0, 1])
trio = dist.new_group([0, 1, 2])

inner = torch.ones(4)
outer = torch.ones(4)
if rank == 0:
    dist.all_reduce(inner, group=pair)  # (a)
    dist.all_reduce(outer, group=trio)
elif rank == 1:
    dist.all_reduce(outer, group=trio)  # (b)
    dist.all_reduce(inner, group=pair)
else:
    dist.all_reduce(outer, group=trio)

print(f"rank {rank}: {inner.sum().item()} {outer.sum().item()}")
dist.destroy_process_group()
