"""The proof of the 16-bit variants: what can be exact is exact, and the rest is within a few units of the format.

  gradients          N ranks against one process of the same arithmetic: only the order of sums differs
  float64 gradients  against the exact ones at the same weights, where nothing underflows: not for plain fp16
  clipped gradients  what the optimizer is given, unscaled and clipped, against the clipped one of one process (LAB_CLIP)
  update             weights against w - lr·g of the gradient that was given, in units in the last place of what is stepped
  unscaled           in float32, where nothing under- or overflows: scaled and unscaled again are the same to the bit
  replicas           the same weights on all ranks, to the bit

Gradients are compared by the norm of the difference over the norm, in units of the format's epsilon; the tolerances are in
those units. Plain SGD, as in every proof: Adam would divide an error of scale away.
"""

import copy
from collections.abc import Iterable

import torch
from torch import Tensor

from experiments.precision.claims import SCALED
from experiments.precision.halved import Cast, Halved
from workers.lab import Lab, Variant
from workers.parallel.rounding import ulp
from workers.passes.replicas import check_replicas
from workers.workload.data import Batches, Microbatch
from workers.workload.model import Model

SAME_ARITHMETIC, EXACT = 8.0, 16.0  # epsilons: sums in another order; all roundings of a forward and a backward pass
ONE_ULP = 1.0  # half a unit to the nearest, up to one at random
LEARNING_RATE = 2.0**-7  # a power of two: its product with a gradient is exact, so that an update is rounded once
STEPS = 2
MOST_HALVINGS = 40  # from 65536 to far below 1


def prove(lab: Lab, name: str, build: Variant) -> None:
    """Two steps of one variant."""
    config = lab.config.model_copy(update={"optimizer": "sgd", "lr": LEARNING_RATE})
    batches = lab.batches(torch.float32, proof=True)
    strategy = build(lab.model(torch.float32), lab.group, config)
    assert isinstance(strategy, Halved)
    for step in range(STEPS):
        lab.at(step, f"proof of {name}")
        parts = batches.dealt(step, lab.rank, lab.world_size)
        backward(strategy, parts)
        if lab.rank == 0:
            check_gradients(lab, name, strategy, batches, step)
        check_update(lab, name, strategy)
        lab.exchange.barrier("one process")
    check_replicas(lab, name, strategy)
    if name in SCALED:
        check_unscaled(lab, name, batches.dealt(0, lab.rank, lab.world_size))


def backward(strategy: Halved, parts: list[Microbatch]) -> None:
    """Gradients at the largest scale that they bear: every overflow halves it, as in training."""
    for _ in range(MOST_HALVINGS):
        strategy.backward(parts)
        if strategy.loss_scale is None or summed(strategy).isfinite().all():
            return
        strategy.update()


def check_gradients(lab: Lab, name: str, strategy: Halved, batches: Batches, step: int) -> None:
    """The sum over all ranks, on rank 0, against one process in the same arithmetic and in float64."""
    dtype = strategy.dtype
    found = summed(strategy)
    for check, computing, tolerance in (
        ("gradients", dtype, SAME_ARITHMETIC),
        ("float64 gradients", torch.float64, EXACT),
    ):
        if check == "gradients" or name != "fp16":
            wanted = one_process(
                strategy.model, batches.full(step), computing, strategy.scale if computing == dtype else 1.0
            )
            lab.check(check, epsilons(found, wanted, dtype), tolerance, variant=name, detail=f"in epsilons of {dtype}")


def check_update(lab: Lab, name: str, strategy: Halved) -> None:
    """What the optimizer is given and what becomes of it, on every rank: nothing is sent."""
    wanted, dtype = summed(strategy), strategy.dtype
    strategy.ready()
    given = flat([parameter.grad for parameter in strategy.stepped])
    if strategy.config.clip is not None:
        clipped = wanted * min(1.0, strategy.config.clip / wanted.norm().item())
        lab.check(
            "clipped gradients",
            epsilons(given, clipped, dtype),
            SAME_ARITHMETIC,
            variant=name,
            detail=f"in epsilons of {dtype}",
        )
    exact = flat(strategy.stepped) - LEARNING_RATE * given
    strategy.take()
    unit = strategy.remembered[0].dtype
    off = ((flat(strategy.remembered) - exact).abs() / ulp(exact, unit)).max().item()
    lab.check("update", off, ONE_ULP, variant=name, detail=f"in units in the last place of {unit}")


def check_unscaled(lab: Lab, name: str, parts: list[Microbatch]) -> None:
    """A power of two changes no digit."""
    gradients = []
    for scaled in (True, False):
        strategy = Halved(lab.model(torch.float32), lab.group, lab.config, torch.float32, scaled=scaled)
        strategy.backward(parts)
        gradients.append(summed(strategy))
    lab.check("unscaled", (gradients[0] - gradients[1]).abs().max().item(), 0.0, variant=name)


def one_process(model: Model, batch: Microbatch, dtype: torch.dtype, scale: float) -> Tensor:
    """The unscaled gradient of the whole batch at the weights of `model`, computed in `dtype`, as a vector in float64."""
    alone = copy.deepcopy(model).to(dtype)
    alone.zero_grad()
    (Cast(alone, dtype)(batch.inputs, batch.targets) * batch.share * scale).backward()
    return flat([parameter.grad for parameter in alone.parameters()]) / scale


def summed(strategy: Halved) -> Tensor:
    """The gradient over all ranks as it was summed, unscaled, as a vector in float64."""
    return flat([parameter.grad for parameter in strategy.model.parameters()]) / strategy.scale


def flat(tensors: Iterable[Tensor | None]) -> Tensor:
    """All numbers of some tensors, detached, as one vector in float64."""
    return torch.cat([tensor.detach().double().flatten() for tensor in tensors if tensor is not None])


def epsilons(found: Tensor, wanted: Tensor, dtype: torch.dtype) -> float:
    """The norm of the difference over the norm, in units of the epsilon of `dtype`."""
    off: float = (torch.linalg.vector_norm(found - wanted) / torch.linalg.vector_norm(wanted)).item()
    return off / torch.finfo(dtype).eps
