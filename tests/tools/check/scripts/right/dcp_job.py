"""A sharded training with batches, checkpoints, a metric and an evaluation, all of them on all ranks."""

import shutil
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

SAMPLES = 12


def evaluate(model: nn.Module) -> float:
    with torch.no_grad():
        return float(model(torch.ones(5, 4)).mean())


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    samples = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(rank))
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    for step, (batch,) in enumerate(DataLoader(TensorDataset(samples), batch_size=3)):
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        if step == 1:
            dcp.save({"model": model.state_dict()}, checkpoint_id=folder[0])
    mean = loss.detach()
    dist.all_reduce(mean)
    print(f"rank {rank}: loss {mean / dist.get_world_size():.3f}")
    print(f"rank {rank}: {evaluate(model):.3f}")
    dcp.load({"model": model.state_dict()}, checkpoint_id=folder[0])
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folder[0])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
