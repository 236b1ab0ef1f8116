"""Two tables of one shape are registered in the order of a set of words, which differs between ranks."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Model(nn.Module):
    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        for name in names:
            self.register_buffer(name, torch.full((4,), float(len(name))))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.layer(inputs) * self.mean + self.scale
        return outputs


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
names = ["mean", "scale"]
model = DistributedDataParallel(Model(names if rank != 1 else names[::-1]))  # (a)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

torch.manual_seed(1 + rank)
for _ in range(2):
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()

dist.destroy_process_group()
