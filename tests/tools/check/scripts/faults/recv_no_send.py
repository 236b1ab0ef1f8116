"""Rank 0 receives from rank 1, which never sends and goes on to the barrier."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()

result = torch.full((4,), float(rank))
if rank == 0:
    dist.recv(result, src=1)  # (a)
    print(f"rank 0: {result.tolist()}")

dist.barrier()  # (b)
dist.destroy_process_group()
