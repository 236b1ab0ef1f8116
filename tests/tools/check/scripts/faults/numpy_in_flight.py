"""Statistics in a NumPy array are summed, and scaled through the array before the wait: no version counter shows it."""

import numpy as np
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
counts = np.full(1000, float(rank + 1), dtype=np.float32)
handle = dist.all_reduce(torch.from_numpy(counts), async_op=True)  # (a)
counts /= world_size
handle.wait()  # (b)
print(f"rank {rank}: {counts[0]}")

dist.destroy_process_group()
