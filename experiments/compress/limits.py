"""Gradients that a method can say whole: what comes out has to be the dense sum, and nothing may be left over."""

import torch
import torch.distributed as dist
from torch import Size, Tensor, nn

from experiments.compress.predictions import own
from experiments.compress.witness import watched
from workers.contract import Build
from workers.lab import Lab
from workers.workload.model import Model


def limit_difference(lab: Lab, method: str, build: Build) -> float:
    """The largest difference to the dense sum or number left over, for the gradient that suits the method.

    bf16, fp16: small integers. int8: integers up to the number of levels. topk, randomk: any, at ratio 1. sign: one
    magnitude a rank. powersgd: matrices of half its rank, in one column space, so that their sum has it too; of its
    whole rank the drawn Q all but misses a direction (2.6e-12 at rank 320).
    """
    low_rank = own(lab.config).low_rank
    shape = Size((4 * low_rank + 8, 3 * low_rank + 6))  # two factors of it are smaller
    layer = nn.Linear(shape[1], shape[0], bias=False)
    model = Model("limit", [layer], nn.Identity()).to(lab.device, torch.float64)
    strategy = build(model, lab.mesh, lab.config.with_own(ratio=1.0))
    gradients, [witness] = watched(strategy)
    gradient = whole(method, lab.rank, lab.world_size, shape, low_rank).to(lab.device)
    gradients.zero()
    with gradients.accumulate(last=True):
        (layer.weight.flatten() @ gradient).backward()  # of which it is the gradient
    gradients.finish()
    dense, rest = gradient.clone(), witness.rest.clone()
    for tensor in (dense, rest):
        dist.all_reduce(tensor, group=lab.group)
    return (torch.maximum((witness.total - dense).abs().max(), rest.abs().max()) / dense.abs().max()).item()


def whole(method: str, rank: int, world_size: int, shape: Size, low_rank: int) -> Tensor:
    """This rank's gradient, flat, float64."""
    generator = torch.Generator().manual_seed(rank)
    shared = torch.Generator().manual_seed(world_size)
    if method == "int8":
        levels = 127 // world_size
        codes = torch.randint(-levels, levels + 1, shape, generator=generator).double().flatten()
        codes[0] = levels  # so that the scale is one
        return codes
    if method == "sign":
        signs = torch.randint(2, shape, generator=generator).double().flatten() * 2 - 1
        return signs * (rank + 2)
    if method == "powersgd":
        inner = (low_rank + 1) // 2
        columns = torch.randn(shape[0], inner, generator=shared, dtype=torch.float64)
        return (columns @ torch.randn(inner, shape[1], generator=generator, dtype=torch.float64)).flatten()
    return torch.randint(-7, 8, shape, generator=generator).double().flatten()
