"""Gradients are averaged by hand only at every second step, and each step uses them."""

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

torch.manual_seed(1 + dist.get_rank())
for step in range(6):
    inputs = torch.randn(8, 4)
    optimizer.zero_grad()
    nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True)).backward()
    if step < 2 or step % 2:
        for parameter in model.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)  # (a)
                parameter.grad /= dist.get_world_size()
    optimizer.step()  # (b)

dist.destroy_process_group()
