"""Data parallelism by hand: parameters broadcast once, gradients averaged in one flat bucket per step."""

import os

import torch
import torch.distributed as dist
from torch import nn


def average_gradients(model: nn.Module) -> None:
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    flat = torch.cat([g.flatten() for g in gradients])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for gradient, mean in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(mean.view_as(gradient))


def main() -> None:
    rank = int(os.environ["RANK"])
    torch.manual_seed(rank)  # the data differ; so do the first weights, until the broadcast
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    dist.init_process_group("gloo")
    with torch.no_grad():
        for parameter in model.parameters():
            dist.broadcast(parameter, src=0)

    for step in range(4):
        x = torch.randn(16, 8)
        y = x.sum(dim=1, keepdim=True)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        average_gradients(model)
        optimizer.step()
        print(f"rank {rank}, step {step}: loss {loss.item():.4f}", flush=True)

    weights = sum(p.sum().item() for p in model.parameters())
    print(f"rank {rank}: weights sum to {weights:.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
