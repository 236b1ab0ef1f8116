"""Rank 1 calls os._exit(7) in the middle without any output, and the others wait for it."""

import os

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()

for step in range(5):
    loss = torch.tensor([1.0 / (step + 1)])
    if rank == 1 and step == 3:
        os._exit(7)
    dist.all_reduce(loss)  # (a)

dist.destroy_process_group()
