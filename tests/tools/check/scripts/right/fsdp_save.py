"""A sharded model saved by all ranks with torch.distributed.checkpoint, and loaded into a fresh one."""

import shutil
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard


def build(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    fully_shard(model)
    return model, torch.optim.Adam(model.parameters(), lr=0.01)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> float:
    data = torch.Generator().manual_seed(seed)
    for _ in range(2):
        x = torch.randn(8, 8, generator=data)
        optimizer.zero_grad()
        loss = (model(x) - x.sum(dim=1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
    last: float = loss.item()
    return last


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    agreed = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(agreed, src=0)
    folder = agreed[0]
    assert folder is not None

    model, optimizer = build(seed=0)
    train(model, optimizer, seed=10 + rank)
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=folder)

    fresh, its_optimizer = build(seed=1)
    weights, moments = get_state_dict(fresh, its_optimizer)
    dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=folder)
    set_state_dict(fresh, its_optimizer, model_state_dict=weights, optim_state_dict=moments)
    assert train(model, optimizer, seed=20 + rank) == train(fresh, its_optimizer, seed=20 + rank)

    dist.barrier()
    if rank == 0:
        shutil.rmtree(folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
