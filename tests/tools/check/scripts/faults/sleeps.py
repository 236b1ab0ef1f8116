"""Nothing is wrong: rank 1 is slow before the all_reduce, and the others wait 6 seconds for it."""

import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()

total = torch.ones(4)
dist.all_reduce(total)
if rank == 1:
    time.sleep(6)
dist.all_reduce(total)
print(f"rank {rank}: {total.tolist()}")

dist.destroy_process_group()
