"""Each rank keeps a scale of its samples in a buffer that DDP does not broadcast, and writes it into the weights."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Scaled(nn.Module):
    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.scale.mul_(0.9).add_(0.1 * x.detach().std())
        found: torch.Tensor = self.layer(x)
        return found


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    module = Scaled()
    model = DistributedDataParallel(module, broadcast_buffers=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1 + dist.get_rank())
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()  # (a)
        with torch.no_grad():
            module.layer.weight.div_(module.scale)
    dist.destroy_process_group()
