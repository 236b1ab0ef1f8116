"""Each rank of a tensor-parallel group draws its own samples, although all have parts of one layer."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

dist.init_process_group("gloo")
rank = dist.get_rank()
mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 1))
parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
torch.manual_seed(1 + rank)
for _ in range(2):
    x = torch.randn(5, 8)
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()  # (a)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"rank {rank}: {loss.item()}")

dist.destroy_process_group()
