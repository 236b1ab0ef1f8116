"""Each rank has a buffer of its own length, and DDP does not broadcast buffers."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

if __name__ == "__main__":
    dist.init_process_group("gloo")
    module = nn.Linear(4, 1)
    module.register_buffer("seen", torch.zeros(10 + dist.get_rank()))
    model = DistributedDataParallel(module, broadcast_buffers=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1 + dist.get_rank())
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(2, 4)).mean().backward()
        optimizer.step()
    dist.destroy_process_group()
