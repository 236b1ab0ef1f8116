"""Rank 1 raises at once; rank 0 makes its next call after as many seconds as its argument says."""

import sys
import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
dist.barrier()
if dist.get_rank() == 1:
    raise ValueError("label 11 is out of range")  # (b)
time.sleep(float(sys.argv[1]))
dist.all_reduce(torch.ones(1))  # (a)
