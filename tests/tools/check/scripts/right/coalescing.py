"""The gradients of all parameters in one coalesced all-reduce, tensor by tensor in the code."""

import torch
import torch.distributed as dist
from torch import nn


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    dist.init_process_group("gloo")
    rank, n = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1 + rank)

    for _ in range(3):
        x = torch.randn(16, 8)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), x.sum(dim=1, keepdim=True)).backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        with dist._coalescing_manager(async_ops=True) as manager:
            for gradient in gradients:
                dist.all_reduce(gradient)
        manager.wait()
        for gradient in gradients:
            gradient /= n
        optimizer.step()

    print(f"rank {rank}: weights sum to {sum(p.sum().item() for p in model.parameters()):.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
