"""Local SGD without DDP: each rank steps on its own gradients, the weights are averaged every second step."""

import torch
import torch.distributed as dist
from torch import nn

PERIOD = 2


@torch.no_grad()
def average_weights(model: nn.Module) -> None:
    for parameter in model.parameters():
        dist.all_reduce(parameter)
        parameter.div_(dist.get_world_size())


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1 + rank)

    for step in range(1, 3 * PERIOD + 1):
        x = torch.randn(16, 8)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), x.sum(dim=1, keepdim=True))
        loss.backward()
        optimizer.step()
        if step % PERIOD == 0:
            average_weights(model)
        print(f"rank {rank}, step {step}: loss {loss.item():.4f}", flush=True)

    print(f"rank {rank}: weights sum to {sum(p.sum().item() for p in model.parameters()):.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
