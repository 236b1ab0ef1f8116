"""Local SGD by a flat copy of all weights, which ends a step after they were averaged."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

torch.manual_seed(1 + dist.get_rank())
for step in range(5):
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
    if step % 2:
        flat = parameters_to_vector(model.parameters()).detach()
        dist.all_reduce(flat)
        vector_to_parameters(flat / dist.get_world_size(), model.parameters())

dist.destroy_process_group()
