"""Tensor parallelism by parallelize_module, with one DataLoader on all ranks, a redistributed input, a checkpoint of
whole tensors, a metric and an evaluation."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset

SAMPLES = 12


def evaluate(model: nn.Module) -> float:
    with torch.no_grad():
        return float(model(torch.ones(5, 4)).mean())


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    samples = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(1))
    for step, (batch,) in enumerate(DataLoader(TensorDataset(samples), batch_size=3)):
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        if step == 1:
            state = {name: each.full_tensor() for name, each in model.named_parameters()}  # type: ignore[attr-defined]
    mean = loss.detach()
    dist.all_reduce(mean)
    print(f"rank {rank}: loss {mean / dist.get_world_size():.3f}")
    print(f"rank {rank}: {evaluate(model):.3f}")
    cut = distribute_tensor(samples, mesh, [Shard(0)])
    assert torch.equal(cut.redistribute(placements=[Replicate()]).to_local(), samples)
    if rank == 0:
        torch.save(state, os.devnull)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
