"""Ranks of unequal speed: rank r needs 0.3 r seconds longer before each all-reduce, and the others wait for it."""

import time

import torch
import torch.distributed as dist


def main() -> None:
    dist.init_process_group("gloo")
    rank, n = dist.get_rank(), dist.get_world_size()
    total = torch.zeros(8)
    for step in range(4):
        time.sleep(0.3 * rank)  # longer sequences, a slower disk
        value = torch.full((8,), float(rank + step))
        dist.all_reduce(value)
        total += value / n
    print(f"rank {rank}: {total[0].item():.2f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
