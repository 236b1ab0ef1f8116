"""A lesson that fails as a card does, by LAB_SEED: 1, NCCL is given a tensor of the CPU; 2, a collective that does not
end; 3, more memory than there is. Without a card the same of gloo, whose rank 1 leaves out a sum."""

import torch
import torch.distributed as dist

from distlab.contract import Mode
from distlab.lab.lab import Lab

FOREVER = 10**12  # cycles of a card's clock


def run(lab: Lab) -> None:
    number = torch.ones(1, device=lab.device)
    if lab.config.seed == 1:
        lab.at(1, "a sum of the CPU's")
        wrong = torch.ones(1) if lab.device.type == "cuda" else torch.ones(1, dtype=torch.int16)  # gloo adds none
        dist.all_reduce(wrong, group=lab.group)
    elif lab.config.seed == 2:
        lab.at(2, "a sum that does not end")
        if lab.device.type == "cuda":
            torch.cuda._sleep(FOREVER)
        if lab.device.type == "cuda" or lab.rank == 0:
            dist.all_reduce(number, group=lab.group)
        number.item()
        dist.all_reduce(number, group=lab.group)
        number.item()
    else:
        lab.at(3, "too large a tensor")
        torch.empty(1 << 60, device=lab.device)


MODE = Mode(run=run)
