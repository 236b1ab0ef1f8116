"""The body is frozen when DDP is created; to train it, DDP is created again with its own optimizer."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    body, head = nn.Linear(4, 8), nn.Linear(8, 1)
    body.requires_grad_(False)
    torch.manual_seed(1 + dist.get_rank())
    for phase in range(2):
        body.requires_grad_(phase == 1)
        model = DistributedDataParallel(nn.Sequential(body, nn.Tanh(), head))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        for _ in range(3):
            inputs = torch.randn(8, 4)
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True)).backward()
            optimizer.step()
    dist.destroy_process_group()


main()
