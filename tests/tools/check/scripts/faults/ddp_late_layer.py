"""Adapters are added to the frozen layers after the model was wrapped in DDP."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Adapted(nn.Module):
    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer
        self.down = nn.Linear(layer.in_features, 2, bias=False)
        self.up = nn.Linear(2, layer.out_features, bias=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.layer(inputs) + self.up(self.down(inputs))
        return outputs


dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))  # (a)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for index in (0, 2):
    layer = model.module[index]
    model.module[index] = Adapted(layer)
    optimizer.add_param_group({"params": [model.module[index].down.weight, model.module[index].up.weight]})

torch.manual_seed(1 + dist.get_rank())
for _ in range(3):
    inputs = torch.randn(8, 4)
    optimizer.zero_grad()
    nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True)).backward()
    optimizer.step()

dist.destroy_process_group()
