"""The script starts its own ranks three times: as many as there are, half of them with two devices each, and all."""

import os

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def train(rank: int, world_size: int) -> None:
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", "12355"
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(8, 1))
    torch.manual_seed(1 + rank)
    model(torch.randn(16, 8)).mean().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    dist.destroy_process_group()


if __name__ == "__main__":
    world_size = torch.cuda.device_count()
    if world_size < 4:
        print(f"4 GPUs are needed, and there are {world_size}")
    else:
        for used in (4, 2, 4):
            torch.multiprocessing.spawn(train, args=(used,), nprocs=used)
