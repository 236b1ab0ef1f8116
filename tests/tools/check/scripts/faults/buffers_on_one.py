"""Rank 0 alone evaluates an example through DDP, which broadcasts its buffers while no other rank receives them."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1 + rank)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()  # (b)
        if rank == 0:
            model(torch.randn(8, 4))  # (a)
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
