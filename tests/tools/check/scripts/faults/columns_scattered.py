"""Rank 0 scatters columns of a table: each is a view with gaps, and gloo sends what follows its first element."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
mine = torch.empty(5)
table = torch.arange(5.0 * world_size).reshape(5, world_size)
columns = list(table.unbind(1)) if rank == 0 else None
dist.scatter(mine, columns, src=0)  # (a)
print(f"rank {rank}: {mine.tolist()}")

dist.destroy_process_group()
