"""Rank 1 fails before the all_reduce and calls a barrier in its except, which the others do not call."""

import torch
import torch.distributed as dist


def load(rank: int, step: int) -> torch.Tensor:
    if rank == 1 and step == 2:
        raise OSError("shard 2 cannot be read")
    return torch.full((4,), float(step))


dist.init_process_group("gloo")
rank = dist.get_rank()

for step in range(4):
    try:
        batch = load(rank, step)
        dist.all_reduce(batch)  # (a)
    except OSError as error:
        print(f"rank {rank}: skipped step {step}: {error}")
        dist.barrier()  # (b)

dist.destroy_process_group()
