"""Gradient accumulation with DDP: no_sync on all micro-batches but the last of each step."""

import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS = 3
MICRO_BATCHES = 4


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    torch.manual_seed(1 + rank)

    for step in range(STEPS):
        optimizer.zero_grad()
        total = 0.0
        for micro in range(MICRO_BATCHES):
            x = torch.randn(4, 8)
            y = x.mean(dim=1, keepdim=True)
            last = micro == MICRO_BATCHES - 1
            with contextlib.nullcontext() if last else model.no_sync():
                loss = nn.functional.mse_loss(model(x), y) / MICRO_BATCHES
                loss.backward()
            total += loss.item()
        optimizer.step()
        print(f"rank {rank}, step {step}: loss {total:.4f}", flush=True)

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
