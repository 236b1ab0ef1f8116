"""The last all_reduce is under `if rank == 0`, and the others continue to their end."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()

loss = torch.tensor([0.0])
for step in range(3):
    loss = torch.tensor([float(rank + step)])
    dist.all_reduce(loss)  # (b)

if rank == 0:
    dist.all_reduce(loss)  # (a)
    print(f"final loss {loss.item()}")

dist.destroy_process_group()
