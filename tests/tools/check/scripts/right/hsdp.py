"""Replicas of shards with both wrappers, one seed for weights and one per rank for samples; norms are of all shards."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard

dist.init_process_group("gloo")
rank = dist.get_rank()
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
torch.manual_seed(0)
sharded = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
fully_shard(sharded, mesh=mesh)
wrapped = FullyShardedDataParallel(
    nn.Linear(6, 3), device_mesh=mesh, sharding_strategy=ShardingStrategy.HYBRID_SHARD, device_id=torch.device("cpu")
)
for model in (sharded, wrapped):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(10 + rank)
    for _ in range(3):
        loss = model(torch.randn(4, 6)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        if model is wrapped:
            wrapped.clip_grad_norm_(0.1)
        else:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
print(f"rank {rank}: {loss.item()}")

dist.destroy_process_group()
