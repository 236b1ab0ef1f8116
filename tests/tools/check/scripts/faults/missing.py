"""Rank 1 got no samples and skips the all_reduce, so that its all_gather meets the others' all_reduce."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
world_size = dist.get_world_size()

scale = torch.tensor([2.0])
dist.broadcast(scale, src=0)

samples = torch.arange(6.0) if rank != 1 else torch.empty(0)
total = (samples * scale).sum().reshape(1)
if len(samples) > 0:
    dist.all_reduce(total)  # (a)

totals = [torch.zeros(1) for _ in range(world_size)]
dist.all_gather(totals, total)  # (b)
print(f"rank {rank}: {torch.cat(totals).tolist()}")

dist.destroy_process_group()
