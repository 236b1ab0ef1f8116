"""A trainer that ends if torch.cuda or torch.accelerator finds no GPU; then it creates a mesh of them, on which it trains
by DDP and by FSDP, which uses the current GPU by default."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel


def has_enough_gpus() -> bool:
    if len(sys.argv) > 1:
        return torch.cuda.is_available() and torch.cuda.device_count() >= 2
    return torch.accelerator.is_available() and torch.accelerator.device_count() >= 2


def main() -> None:
    if not has_enough_gpus():
        print("There are not enough GPUs to run this.")
        sys.exit(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
    rank = int(os.environ["LOCAL_RANK"])
    kind = torch.accelerator.current_accelerator()
    assert kind is not None
    device = torch.device(f"{kind}:{rank}")
    torch.accelerator.set_device_index(rank)
    assert torch.accelerator.current_device_index() == rank
    dist.init_process_group(dist.get_default_backend_for_device(device), device_id=device)
    mesh = DeviceMesh(kind.type, list(range(dist.get_world_size())), mesh_dim_names=("dp",))
    with torch.device(device):
        model = nn.Linear(4, 1)
    torch.manual_seed(0)
    sharded = FullyShardedDataParallel(nn.Linear(4, 1).to(device), device_mesh=mesh, use_orig_params=True)
    torch.manual_seed(1 + rank)
    for parallel in (DistributedDataParallel(model, device_mesh=mesh["dp"]), sharded):
        optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            parallel(torch.randn(8, 4, device=device)).mean().backward()
            optimizer.step()
    torch.accelerator.synchronize()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
