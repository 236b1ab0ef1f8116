"""Rank 1 skips one layer under DDP without find_unused_parameters, so that its gradients are never reduced."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.extra = nn.Linear(4, 4)

    def forward(self, inputs: torch.Tensor, use_extra: bool) -> torch.Tensor:
        hidden: torch.Tensor = self.body(inputs)
        return hidden + self.extra(hidden) if use_extra else hidden


torch.manual_seed(0)
dist.init_process_group("gloo")
rank = dist.get_rank()
model = DistributedDataParallel(Model())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

for step in range(2):
    torch.manual_seed(10 * step + rank)
    outputs = model(torch.randn(8, 4), use_extra=rank == 0)  # (b)
    optimizer.zero_grad()
    outputs.square().mean().backward()  # (a)
    optimizer.step()

dist.destroy_process_group()
