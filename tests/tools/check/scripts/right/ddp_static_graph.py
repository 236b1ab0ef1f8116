"""DDP with static_graph: one block applied twice, and its activations recomputed in the backward pass."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = checkpoint(self.block, x, use_reentrant=True)
        y: Tensor = self.head(x)
        return y


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(Twice(), static_graph=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(20 + rank)

    for step in range(4):
        x = torch.randn(8, 8, requires_grad=True)  # a reentrant checkpoint needs an input with a gradient
        optimizer.zero_grad()
        loss = (model(x) - x.detach().sum(dim=1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        print(f"rank {rank}, step {step}: loss {loss.item():.4f}", flush=True)

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
