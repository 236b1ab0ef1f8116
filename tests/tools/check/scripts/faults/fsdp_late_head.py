"""A new head is added to the model after fully_shard was applied to it."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
fully_shard(model[0], mesh=mesh)
fully_shard(model, mesh=mesh)
model.append(nn.Linear(4, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)

torch.manual_seed(1 + dist.get_rank())
for _ in range(3):
    inputs = torch.randn(8, 4)
    optimizer.zero_grad()
    nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True)).backward()
    optimizer.step()  # (a)

dist.destroy_process_group()
