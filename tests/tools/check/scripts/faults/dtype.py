"""Rank 1 sums float64 where the others sum float32."""

import numpy as np
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()

counts = torch.from_numpy(np.ones(16)) if rank == 1 else torch.ones(16)
dist.all_reduce(counts)  # (a)
print(f"rank {rank}: {counts.tolist()}")

dist.destroy_process_group()
