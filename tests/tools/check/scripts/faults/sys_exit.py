"""Rank 1 finds nothing to do and calls sys.exit(3), the others wait for it in all_reduce."""

import sys

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()

files = ["a.bin", "b.bin"] if rank != 1 else []
count = torch.tensor([len(files)])
dist.broadcast(count, src=0)
if not files:
    print(f"rank {rank}: no files")
    sys.exit(3)  # (b)
dist.all_reduce(count)  # (a)
print(f"rank {rank}: {count.item()}")

dist.destroy_process_group()
