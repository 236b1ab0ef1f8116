"""The sharded model is evaluated by rank 0 alone, and its forward gathers parameters from all ranks."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

torch.manual_seed(0)
dist.init_process_group("gloo")
rank = dist.get_rank()
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
model = nn.Linear(8, 8)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

torch.manual_seed(1 + rank)
model(torch.randn(4, 8)).square().mean().backward()
optimizer.step()

if rank == 0:
    with torch.no_grad():
        score = model(torch.randn(4, 8)).square().mean()  # (b)
    print(f"score {score.item()}")

dist.barrier()  # (a)
dist.destroy_process_group()
