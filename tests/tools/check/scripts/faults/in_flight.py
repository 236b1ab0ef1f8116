"""The gradient is written while its all_reduce is still running: the wait comes after the write."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
world_size = dist.get_world_size()

gradient = torch.full((1000,), float(rank + 1))
handle = dist.all_reduce(gradient, async_op=True)  # (a)
gradient.mul_(1 / world_size)  # (b)
handle.wait()
print(f"rank {rank}: {gradient[0].item()}")

dist.destroy_process_group()
