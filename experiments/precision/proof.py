"""The proof of the 16-bit variants: what can be exact is exact, and the rest is within a few units of the format.

  gradients          N ranks against one process of the same arithmetic: only the order of sums differs
  float64 gradients  against the exact ones at the same weights, where nothing underflows: not for plain fp16
  clipped gradients  what the optimizer is given, unscaled and clipped, against what was summed, clipped (LAB_CLIP)
  update             weights against w - lr·g of the gradient that was given, in units in the last place of the weights
  unscaled           in float32, where nothing under- or overflows: scaled and unscaled again are the same to the bit
  replicas           the same weights on all ranks, to the bit

Gradients are compared by the norm of the difference over the norm, in units of the format's epsilon; the tolerances are
in those units. Plain SGD, as in every proof: Adam would divide an error of scale away.
"""

import copy
import math
from collections.abc import Iterable

import torch
from torch import Tensor

from experiments.precision.formats import converted
from experiments.precision.predictions import SCALED
from experiments.precision.seen import remembered
from workers.contract import Build
from workers.lab import Lab
from workers.parallel.buckets import GradientBuckets
from workers.parallel.rounding import ulp
from workers.passes.replicas import check_replicas
from workers.strategies.replica import Replica
from workers.workload.data import Batches, Microbatch
from workers.workload.model import Model
from workers.workload.optimizer import PlainSGD

SAME_ARITHMETIC, EXACT = 8.0, 16.0  # epsilons: sums in another order; all roundings of a forward and a backward pass
ONE_ULP = 1.0  # half a unit to the nearest, up to one at random
LEARNING_RATE = 2.0**-7  # a power of two: its product with a gradient is exact, so that an update is rounded once
STEPS = 2
MOST_HALVINGS = 40  # from 65536 to far below 1


class Witness(PlainSGD):
    """Plain SGD that writes down what it steps, and what it is given, as vectors in float64."""

    weights: Tensor | None = None  # before the last step
    given: Tensor | None = None

    def step(self) -> None:
        self.weights = flat(self.parameters)
        self.given = flat(parameter.grad for parameter in self.parameters)
        super().step()


def prove(lab: Lab, name: str, build: Build) -> None:
    """Two steps of one variant."""
    config = lab.config.model_copy(update={"optimizer": "sgd", "lr": LEARNING_RATE})
    batches = lab.batches(torch.float32, proof=True)
    strategy = build(lab.model(torch.float32), lab.mesh, config)
    assert isinstance(strategy, Replica)
    assert isinstance(strategy.optimizer, PlainSGD)
    strategy.optimizer = Witness(strategy.optimizer.parameters, LEARNING_RATE)
    for step in range(STEPS):
        lab.at(step, f"proof of {name}")
        backward(strategy, lab.dealt(batches, step))
        if lab.rank == 0:
            check_gradients(lab, name, strategy, batches, step)
        check_update(lab, name, strategy, strategy.optimizer)
        lab.exchange.barrier("one process")
    check_replicas(lab, name, strategy)
    if name in SCALED:
        check_unscaled(lab, name, build, lab.dealt(batches, 0))


def backward(strategy: Replica, parts: list[Microbatch]) -> None:
    """Gradients at the largest scale that they bear: every overflow halves it, as in training."""
    for _ in range(MOST_HALVINGS):
        strategy.backward(parts)
        scaled = getattr(strategy, "loss_scale", None) is not None
        if not scaled or summed(strategy).isfinite().all():
            return
        strategy.update()


def check_gradients(lab: Lab, name: str, strategy: Replica, batches: Batches, step: int) -> None:
    """The sum over all ranks, on rank 0, against one process in the same arithmetic and in float64."""
    dtype = dtype_of(strategy)
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


def check_update(lab: Lab, name: str, strategy: Replica, witness: Witness) -> None:
    """What the optimizer is given and what becomes of it, on every rank: nothing is sent."""
    wanted, dtype = summed(strategy), dtype_of(strategy)
    witness.given = witness.weights = None
    strategy.update()
    given, weights = witness.given, witness.weights
    if given is None or weights is None:
        lab.check("update", math.inf, ONE_ULP, variant=name, detail="no step was taken")
        return
    if strategy.config.clip is not None:
        clipped = wanted * min(1.0, strategy.config.clip / wanted.norm().item())
        off, detail = epsilons(given, clipped, dtype), f"in epsilons of {dtype}"
        lab.check("clipped gradients", off, SAME_ARITHMETIC, variant=name, detail=detail)
    exact = weights - LEARNING_RATE * given
    after = remembered(strategy)
    unit = after[0].dtype
    off = ((flat(after) - exact).abs() / ulp(exact, unit)).max().item()
    lab.check("update", off, ONE_ULP, variant=name, detail=f"in units in the last place of {unit}")


def check_unscaled(lab: Lab, name: str, build: Build, parts: list[Microbatch]) -> None:
    """A power of two changes no digit: the variant in float32 has the gradients of a replica without a scale."""
    model, bucket_bytes = lab.model(torch.float32), lab.config.bucket_mib * 2**20  # of one size: added in one order
    exact = Replica(model, lab.config, GradientBuckets(model.parameters(), lab.mesh.group, bucket_bytes))
    strategy = build(lab.model(torch.float32), lab.mesh, lab.config, dtype=torch.float32)
    assert isinstance(strategy, Replica)
    for each in (strategy, exact):
        each.backward(parts)
    lab.check("unscaled", (summed(strategy) - summed(exact)).abs().max().item(), 0.0, variant=name)


def one_process(model: Model, batch: Microbatch, dtype: torch.dtype, scale: float) -> Tensor:
    """The unscaled gradient of the batch at the weights of `model`, computed in `dtype`, as a vector in float64."""
    alone = copy.deepcopy(model).to(dtype)
    alone.zero_grad()
    inputs, targets, share = converted(batch, dtype)
    (alone(inputs, targets) * share * scale).backward()
    return flat([parameter.grad for parameter in alone.parameters()]) / scale


def dtype_of(strategy: Replica) -> torch.dtype:
    """What it computes in."""
    return next(strategy.model.parameters()).dtype


def summed(strategy: Replica) -> Tensor:
    """The gradient over all ranks as it was summed, unscaled, as a vector in float64."""
    return flat([parameter.grad for parameter in strategy.model.parameters()]) / strategy.scale


def flat(tensors: Iterable[Tensor | None]) -> Tensor:
    """All numbers of some tensors, detached, as one vector in float64."""
    return torch.cat([tensor.detach().double().flatten() for tensor in tensors if tensor is not None])


def epsilons(found: Tensor, wanted: Tensor, dtype: torch.dtype) -> float:
    """The norm of the difference over the norm, in units of the epsilon of `dtype`."""
    off: float = (torch.linalg.vector_norm(found - wanted) / torch.linalg.vector_norm(wanted)).item()
    return off / torch.finfo(dtype).eps
