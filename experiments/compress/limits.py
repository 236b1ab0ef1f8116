"""Gradients that a method can say whole: what comes out has to be the dense sum, and nothing may be left over."""

import torch
import torch.distributed as dist
from torch import Size, Tensor

from experiments.compress.methods import compressor_of
from workers.lab import Lab


def limit_difference(lab: Lab, method: str, *, feedback: bool) -> float:
    """The largest difference to the dense sum, and the largest number left over, for the gradient that suits the method.

    bf16, fp16: small integers. int8: integers up to the number of levels. topk, randomk: any, at ratio 1. sign: one
    magnitude a rank. powersgd: matrices of half its rank, in one column space, so that their sum has it too; of its whole rank the
    drawn Q all but misses a direction (2.6e-12 at rank 320).
    """
    config = lab.config.model_copy(update={"ratio": 1.0})
    shape = Size((4 * config.low_rank + 8, 3 * config.low_rank + 6))  # two factors of it are smaller
    compressor = compressor_of(method, lab.group, config, [shape], feedback=feedback)
    bucket = whole(method, lab.rank, lab.world_size, shape, config.low_rank)
    dense = bucket.clone()
    dist.all_reduce(dense, group=lab.group)
    compressor(bucket).wait()
    off = (bucket - dense).abs().max() / dense.abs().max()
    if compressor.residual is not None:
        rest = compressor.residual.clone()
        dist.all_reduce(rest, group=lab.group)
        off = torch.maximum(off, rest.abs().max() / dense.abs().max())
    return off.item()


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
