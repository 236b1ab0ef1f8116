"""Gradients that a method can say whole, or has to bear: what comes out, and what is left over.

One of a kind that suits the method has to come out as the dense sum, with nothing left; one of zeros as zeros, though
its scale is zero; and of one beyond the range of 16 bits casts send what fits N times, and keep the rest.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Size, Tensor, nn

from experiments.compress.predictions import own
from experiments.compress.witness import Witness, watched
from workers.contract import Build
from workers.lab import Lab
from workers.measure.difference import apart, larger, largest
from workers.workload.model import Model

TOLERANCE = 1e-12  # over the largest number that is summed
CONTROLS = "tests/experiments/test_compress.py::{}"
CASTS = {"bf16": torch.bfloat16, "fp16": torch.float16}


def check_limits(lab: Lab, name: str, method: str, build: Build) -> None:
    """Each gradient through a strategy of its own."""
    low_rank = own(lab.config).low_rank
    shape = Size((4 * low_rank + 8, 3 * low_rank + 6))  # two factors of it are smaller
    gradient = whole(method, lab.rank, lab.world_size, shape, low_rank)
    control = CONTROLS.format("test_a_limit_that_is_missed_fails_the_run")
    off = max(passed(lab, build, shape, each) for each in (gradient, torch.zeros_like(gradient)))
    lab.check("limit", off, TOLERANCE, name, control=control)
    if method in CASTS:
        # Twice what one rank may send, the same sign on all: N of them would be beyond it on the way.
        beyond = torch.full_like(gradient, 2 * torch.finfo(CASTS[method]).max / (lab.world_size + 1))
        witness = sender(lab, build, shape, ratio=1.0)(beyond)
        left = witness.rest if own(lab.config).error_feedback else beyond - witness.total / lab.world_size
        detail = "twice what a rank may send of 16 bits: a number, and half of it is left"
        off = largest(left / beyond - 0.5)
        # The limit itself is rounded to 16 bits, and N of them to the sum, by half an epsilon each.
        roundings = (lab.world_size + 1) * torch.finfo(CASTS[method]).eps / 2
        lab.check("range", off, roundings, name, detail, control=control)


def passed(lab: Lab, build: Build, shape: Size, gradient: Tensor) -> float:
    """The largest difference to the dense sum or number left over, over the largest number of the sum."""
    witness = sender(lab, build, shape, ratio=1.0)(gradient)
    dense, rest = gradient.to(lab.device), witness.rest.clone()
    for tensor in (dense, rest):
        dist.all_reduce(tensor, group=lab.group)
    return larger(apart(witness.total, dense), largest(rest)) / (largest(dense) or 1.0)


def sender(lab: Lab, build: Build, shape: Size, **options: Any) -> Callable[[Tensor], Witness]:
    """Of one matrix of `shape` what becomes of this rank's gradients [n], flat, one after the other; the mode's own
    `options` are other ones."""
    layer = nn.Linear(shape[1], shape[0], bias=False)
    model = Model("limit", [layer], nn.Identity()).to(lab.device, torch.float64)
    gradients, [witness] = watched(build(model, lab.mesh, lab.config.with_own(**options)))

    def send(gradient: Tensor) -> Witness:
        gradients.zero()
        with gradients.accumulate(last=True):
            (layer.weight.flatten() @ gradient.to(lab.device)).backward()  # of which it is the gradient
        gradients.finish()
        return witness

    return send


def whole(method: str, rank: int, world_size: int, shape: Size, low_rank: int) -> Tensor:
    """This rank's gradient that the method can say whole, flat, float64.

    bf16, fp16: small integers. int8: integers up to the number of levels. topk, randomk: any, at ratio 1. sign: one
    magnitude a rank. powersgd: matrices of half its rank, in one column space, so that their sum has it too; of its
    whole rank the drawn Q all but misses a direction (2.6e-12 at rank 320).
    """
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
