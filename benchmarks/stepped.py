"""A script that trains on command: `stepped.py ddp|fully_shard PORT`; benchmarks/recording.py tells it when.

It reads a number of steps from a socket, takes them, and writes back what they took. It knows nothing of the lab.
"""

import os
import socket
import struct
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

WIDTH, BLOCKS, SAMPLES = 256, 8, 32


def model_of(kind: str) -> nn.Module:
    """8 blocks of 0.53M parameters, as one DDP or each a shard."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(BLOCKS)]
    model = nn.Sequential(*blocks)
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    for block in blocks:
        fully_shard(block)
    fully_shard(model)
    return model


def main(kind: str, port: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = model_of(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    torch.manual_seed(1 + dist.get_rank())
    inputs = torch.randn(SAMPLES, WIDTH)
    with socket.create_connection(("127.0.0.1", port)) as line:
        line.sendall(struct.pack("=i", int(os.environ["RANK"])))
        while steps := struct.unpack("=i", line.recv(4, socket.MSG_WAITALL) or b"\0\0\0\0")[0]:
            began, worked = time.perf_counter(), time.process_time()
            for _ in range(steps):
                optimizer.zero_grad()
                model(inputs).square().mean().backward()
                optimizer.step()
            line.sendall(struct.pack("=dd", time.perf_counter() - began, time.process_time() - worked))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
