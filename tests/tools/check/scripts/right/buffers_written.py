"""A scale is kept in a buffer, averaged over all ranks, and written into the weights; each rank counts samples."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Scaled(nn.Module):
    scale: torch.Tensor
    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = x.detach().std()
        dist.all_reduce(scale)
        self.scale.mul_(0.9).add_(0.1 * scale / dist.get_world_size())
        self.seen.add_(len(x) + dist.get_rank())
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
        optimizer.step()
        with torch.no_grad():
            module.layer.weight.div_(module.scale)
    dist.destroy_process_group()
