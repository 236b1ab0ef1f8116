"""An embedding whose gradient is sparse: its strides are all 0, and gloo gathers its rows."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DistributedDataParallel(nn.EmbeddingBag(20, 4, sparse=True, mode="sum"))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
draw = torch.Generator().manual_seed(rank)
for _ in range(4):
    optimizer.zero_grad()
    model(torch.randint(20, (3, 2), generator=draw)).square().mean().backward()
    optimizer.step()
dist.destroy_process_group()
