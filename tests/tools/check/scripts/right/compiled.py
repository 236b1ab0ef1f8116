"""Models with dropout that are compiled inside of DDP, around it and in its place, around fully_shard, and collectives in
compiled code: torch.compile traces the same as without check, else fullgraph=True raises."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

BACKEND = "aot_eager"  # no compiler of C++ is needed


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 1))


def models() -> Iterator[Any]:
    yield DistributedDataParallel(torch.compile(net(), backend=BACKEND, fullgraph=True))
    yield torch.compile(DistributedDataParallel(net()), backend=BACKEND)
    compiled: Any = DistributedDataParallel(net())
    compiled.compile(backend=BACKEND)
    yield compiled
    sharded: Any = fully_shard(net())
    yield torch.compile(sharded, backend=BACKEND)


@torch.compile(backend=BACKEND, fullgraph=True)
def totals(values: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(values)
    gathered = torch.empty(2 * len(values), values.shape[1])
    dist.all_gather_into_tensor(gathered, values)
    return gathered * 2


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    for model in models():
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        torch.manual_seed(1 + dist.get_rank())
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.randn(6, 4)).mean().backward()
            optimizer.step()
        torch.manual_seed(0)
    for _ in range(2):
        totals(torch.randn(6, 4))
    dist.destroy_process_group()
