"""Three typical wrong answers to puzzle 19, and why each is refused."""

import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

REFUSED = {
    1: r"rank 1 raised .* at 19_checkpoint.py:\d+",
    2: r"step after the kill on rank 0 .* it is the step in which the run was killed, which not all ranks have saved",
    3: r"rank 1 raised .* at 19_checkpoint.py:\d+",
}


def save_1(shard: Tensor, step: int, folder: str, group: dist.ProcessGroup) -> None:
    """The old file is overwritten."""
    torch.save((step, shard), f"{folder}/rank{group.rank()}")
    dist.barrier(group=group)


def load_1(folder: str, group: dist.ProcessGroup) -> tuple[int, Tensor]:
    return torch.load(f"{folder}/rank{group.rank()}")


def save_2(shard: Tensor, step: int, folder: str, group: dist.ProcessGroup) -> None:
    """Each file is atomic, but no rank waits for the others: ranks end at different steps."""
    path = f"{folder}/rank{group.rank()}"
    torch.save((step, shard), path + ".part")
    os.replace(path + ".part", path)
    dist.barrier(group=group)


def load_2(folder: str, group: dist.ProcessGroup) -> tuple[int, Tensor]:
    return torch.load(f"{folder}/rank{group.rank()}")


def save_3(shard: Tensor, step: int, folder: str, group: dist.ProcessGroup) -> None:
    """Rank 0 records the step as the one to load before all ranks have written theirs."""
    if group.rank() == 0:
        Path(folder, "latest").write_text(str(step))
    torch.save(shard, f"{folder}/step{step}-rank{group.rank()}")
    dist.barrier(group=group)


def load_3(folder: str, group: dist.ProcessGroup) -> tuple[int, Tensor]:
    step = int(Path(folder, "latest").read_text())
    return step, torch.load(f"{folder}/step{step}-rank{group.rank()}")
