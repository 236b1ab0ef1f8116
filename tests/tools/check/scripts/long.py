"""All ranks meet ten times a second for a minute, and write down their process id, so that a test can kill one."""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
Path(sys.argv[1], f"pid{dist.get_rank()}").write_text(str(os.getpid()))
for _ in range(600):
    dist.all_reduce(torch.ones(1))
    time.sleep(0.1)
dist.destroy_process_group()
