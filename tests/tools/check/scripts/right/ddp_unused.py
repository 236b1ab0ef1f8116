"""A model of which each step uses one head only, another one per rank, and never the spare one."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 12)
        self.heads = nn.ModuleList([nn.Linear(12, 1), nn.Linear(12, 1)])
        self.spare = nn.Linear(12, 1)

    def forward(self, x: Tensor, head: int) -> Tensor:
        y: Tensor = self.heads[head](torch.relu(self.body(x)))
        return y


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(TwoHeads(), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    torch.manual_seed(1 + rank)

    for step in range(4):
        x = torch.randn(8, 6)
        head = (step + rank) % 2  # the ranks are at different tasks
        y = x[:, head : head + 1]
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x, head), y)
        loss.backward()
        optimizer.step()
        print(f"rank {rank}, step {step}, head {head}: loss {loss.item():.4f}", flush=True)

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
