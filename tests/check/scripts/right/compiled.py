"""A compiled model with dropout under DDP."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 1))
    parallel = DistributedDataParallel(torch.compile(model, backend="aot_eager"))  # no compiler of C++ is needed
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    torch.manual_seed(1 + dist.get_rank())
    for _ in range(2):
        optimizer.zero_grad()
        parallel(torch.randn(6, 4)).mean().backward()
        optimizer.step()
    dist.destroy_process_group()
