"""FullyShardedDataParallel over one axis of a mesh, tensor parallelism over the other."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

if __name__ == "__main__":
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    sharded = FullyShardedDataParallel(
        model, device_mesh=mesh["dp"], use_orig_params=True, device_id=torch.device("cpu")
    )
    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1)
    torch.manual_seed(1 + mesh["dp"].get_local_rank())
    for _ in range(3):
        optimizer.zero_grad()
        sharded(torch.randn(5, 8)).square().mean().backward()
        optimizer.step()
    dist.destroy_process_group()
