"""The loss is read while its all_reduce may still be running: the handle is dropped without a wait."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
world_size = dist.get_world_size()

loss = torch.full((1000,), float(rank + 1))
dist.all_reduce(loss, async_op=True)  # (a)
mean = loss.mean() / world_size  # (b)
print(f"rank {rank}: mean loss {mean.item()}")

dist.barrier()
dist.destroy_process_group()
