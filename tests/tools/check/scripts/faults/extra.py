"""Rank 1 sums its loss once more than the others in the middle of its steps, and waits alone in its last one."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()

for step in range(3):
    loss = torch.full((1,), float(rank + step))
    dist.all_reduce(loss)  # (a)
    print(f"rank {rank}: step {step} loss {loss.item()}")
    if rank == 1 and step == 0:
        dist.all_reduce(loss)  # (b)
        print(f"rank {rank}: first loss {loss.item()}")

dist.destroy_process_group()
