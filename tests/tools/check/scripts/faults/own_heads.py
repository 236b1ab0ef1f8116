"""Clients average a body by hand and keep their own heads, which were equal at the start: a question, and right."""

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
body, head = nn.Linear(4, 8), nn.Linear(8, 2)
for parameter in [*body.parameters(), *head.parameters()]:
    dist.broadcast(parameter.data, src=0)
optimizer = torch.optim.Adam([*body.parameters(), *head.parameters()], lr=0.01)

torch.manual_seed(dist.get_rank())
for _ in range(4):
    optimizer.zero_grad()
    head(torch.relu(body(torch.randn(8, 4)))).square().mean().backward()
    optimizer.step()  # (a)
    for parameter in body.parameters():
        dist.all_reduce(parameter.data)
        parameter.data /= dist.get_world_size()

dist.destroy_process_group()
