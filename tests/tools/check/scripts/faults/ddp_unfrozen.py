"""The body is frozen when DDP is created, and trained from the third step on."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
body, head = nn.Linear(4, 8), nn.Linear(8, 1)
body.requires_grad_(False)
model = DistributedDataParallel(nn.Sequential(body, nn.Tanh(), head))  # (a)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

torch.manual_seed(1 + dist.get_rank())
for step in range(5):
    if step == 2:
        body.requires_grad_(True)
    inputs = torch.randn(8, 4)
    optimizer.zero_grad()
    nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True)).backward()
    optimizer.step()

dist.destroy_process_group()
