"""Rank 1 raises a ValueError in the middle, the others wait for it in all_reduce."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()


def loss_of(step: int) -> torch.Tensor:
    if rank == 1 and step == 2:
        raise ValueError("label 11 is out of range")  # (b)
    return torch.tensor([1.0 / (step + 1)])


for step in range(5):
    loss = loss_of(step)
    dist.all_reduce(loss)  # (a)

dist.destroy_process_group()
