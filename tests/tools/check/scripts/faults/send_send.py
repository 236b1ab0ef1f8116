"""Both ranks send before they receive, and each send waits for the other's recv."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
other = 1 - rank

mine = torch.full((1000,), float(rank))
theirs = torch.empty(1000)
dist.send(mine, dst=other)  # (a)
dist.recv(theirs, src=other)
print(f"rank {rank}: {theirs[0].item()}")

dist.destroy_process_group()
