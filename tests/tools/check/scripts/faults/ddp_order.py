"""Rank 1 creates the model's two layers of one shape in a different order, so that DDP mixes them up."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Attention(nn.Module):
    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({name: nn.Linear(4, 4) for name in names})

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        query: torch.Tensor = self.layers["query"](inputs)
        key: torch.Tensor = self.layers["key"](inputs)
        return torch.softmax(query, 1) * key


torch.manual_seed(0)
dist.init_process_group("gloo")
rank = dist.get_rank()
names = ["query", "key"] if rank == 0 else ["key", "query"]
model = DistributedDataParallel(Attention(names))  # (a)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

for step in range(2):
    torch.manual_seed(10 * step + rank)
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()

dist.destroy_process_group()
