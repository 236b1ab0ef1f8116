"""Rank 0 alone evaluates for three seconds and saves; the others wait for it at a barrier."""

import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def evaluate_and_save(model: nn.Module, folder: Path) -> None:
    start, batches, total = time.monotonic(), 0, 0.0
    with torch.no_grad():
        while time.monotonic() - start < 3:
            x = torch.randn(64, 8)
            total += nn.functional.mse_loss(model(x), x.sum(dim=1, keepdim=True)).item()
            batches += 1
    torch.save(model.state_dict(), folder / "model.pt")
    print(f"{batches} batches, loss {total / batches:.4f}, saved", flush=True)


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    torch.manual_seed(1 + rank)

    for _ in range(3):
        x = torch.randn(16, 8)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), x.sum(dim=1, keepdim=True)).backward()
        optimizer.step()

    if rank == 0:
        with tempfile.TemporaryDirectory() as folder:
            evaluate_and_save(model.module, Path(folder))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
