"""A buffer has a different length on rank 1, and DDP sends rank 0's to all."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
module = nn.Linear(4, 1)
module.register_buffer("counts", torch.zeros(8))
module.register_buffer("seen", torch.zeros(10 + dist.get_rank()))
model = DistributedDataParallel(module)  # (a)
model(torch.randn(2, 4)).mean().backward()
dist.destroy_process_group()
