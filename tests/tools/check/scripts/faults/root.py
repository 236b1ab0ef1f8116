"""Rank 2 passes itself as the source of the broadcast, the others pass rank 0."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()

has_checkpoint = rank in (0, 2)
source = rank if has_checkpoint else 0
weight = torch.full((4,), float(rank))
dist.broadcast(weight, src=source)  # (a)
print(f"rank {rank}: {weight.tolist()}")

dist.destroy_process_group()
