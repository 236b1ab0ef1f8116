"""Rank 1 works for longer than the process group's timeout, while rank 0 waits for it."""

import time
from datetime import timedelta

import torch
import torch.distributed as dist


def main() -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=3))
    dist.barrier()
    if dist.get_rank() == 1:
        until = time.monotonic() + 12
        while time.monotonic() < until:  # (b)
            pass
    dist.all_reduce(torch.ones(1))  # (a)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
