"""The proof of the 16-bit variants: what can be exact is exact, and the rest is within a few units of the format.

  gradients          N ranks against one process of the same arithmetic: only the order of sums differs
  float64 gradients  against the exact ones at the same weights, where nothing underflows: not for plain fp16
  given              what the optimizer is given is what was summed, without the scale, to the bit
  clipped gradients  with LAB_CLIP: what the optimizer is given, unscaled and clipped, against what was summed, clipped
  update             weights against w - lr·g of the gradient that was given, from the weights that the last step left,
                     in units in the last place: half a unit to the nearest, up to one at random (draws.py)
  first masters      masters begin as the float32 weights, to the bit
  copied back        the weights that compute are the masters, rounded
  unscaled           in float32, where nothing under- or overflows: scaled and unscaled again are the same to the bit
  replicas           the same weights on all ranks, to the bit

Scaled variants are rehearsed beside that: overflows are made on purpose (rehearsal.py).

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
# To the nearest: half a unit of the 16 bits, and half a unit of the float32 that is rounded, 2^-13 of them in fp16.
NEAREST = 0.5 + 2.0**-14
# Rounded at random, or twice: fp16 rounds lr·g as well, where it ends, by half a unit of a weight that is as small.
WHOLE = 1.0
CONTROLS = "tests/experiments/test_precision.py::{}"
LAST_PLACE = "units in the last place"
COPIED_BACK = CONTROLS.format("test_masters_that_go_wrong_fail_the_run")
LEARNING_RATE = 2.0**-7  # a power of two: its product with a gradient is exact, so that an update is rounded once
STEPS = 2
MOST_HALVINGS = 40  # from 65536 to far below 1


class Witness(PlainSGD):
    """Plain SGD that writes down what it is given, as a vector in float64."""

    given: Tensor | None = None

    def step(self) -> None:
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
    start = flat(remembered(strategy))
    if remembered(strategy)[0].dtype == torch.float32:
        hold_first_masters(lab, name, start)
    for step in range(STEPS):
        lab.at(step, f"proof of {name}")
        backward(strategy, lab.dealt(batches, step))
        lab.at(step, f"one process, beside {name}")
        if lab.rank == 0:
            check_gradients(lab, name, strategy, batches, step)
        start = check_update(lab, name, strategy, strategy.optimizer, start)
        lab.exchange.barrier("one process")
    check_replicas(lab, name, strategy)
    if name in SCALED:
        check_unscaled(lab, name, build, lab.dealt(batches, 0))


def hold_first_masters(lab: Lab, name: str, start: Tensor) -> None:
    """Masters begin as the float32 weights themselves, and not as what 16 bits leave of them."""
    off = (start - flat(lab.model(torch.float32).parameters())).abs().max().item()
    control = CONTROLS.format("test_masters_that_go_wrong_fail_the_run")
    lab.check("first masters", off, 0.0, variant=name, control=control)


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
            lab.check(
                check,
                epsilons(found, wanted, dtype),
                tolerance,
                variant=name,
                unit=of_type("epsilons", dtype),
                control=CONTROLS.format("test_gradients_that_are_wrong_fail_the_run"),
            )


def check_update(lab: Lab, name: str, strategy: Replica, witness: Witness, start: Tensor) -> Tensor:
    """What the optimizer is given and what becomes of the weights `start`, on every rank; returns those after it."""
    wanted, dtype = summed(strategy), dtype_of(strategy)
    witness.given = None
    strategy.update()
    given, after = witness.given, remembered(strategy)
    tolerance = WHOLE if name in ("bf16_stochastic", "fp16") else NEAREST
    control = CONTROLS.format("test_masters_that_go_wrong_fail_the_run")
    if given is None:
        unit = of_type(LAST_PLACE, after[0].dtype)
        lab.check("update", math.inf, tolerance, name, "no step was taken", unit=unit, control=control)
        return flat(after)
    if strategy.config.clip is None:
        off = (given - wanted).abs().nan_to_num(math.inf).max().item()
        control = CONTROLS.format("test_a_scale_that_stays_in_gradients_fails_the_run")
        lab.check("given", off, 0.0, variant=name, detail="to the optimizer, of what was summed", control=control)
    else:
        clipped = wanted * min(1.0, strategy.config.clip / wanted.norm().item())
        off = epsilons(given, clipped, dtype)  # LAB_BUG=unscaled_clip
        lab.check("clipped gradients", off, SAME_ARITHMETIC, variant=name, unit=of_type("epsilons", dtype))
    control = CONTROLS.format("test_masters_that_go_wrong_fail_the_run")
    exact = start - LEARNING_RATE * given
    stored = after[0].dtype
    off = ((flat(after) - exact).abs() / ulp(exact, stored)).max().item()
    lab.check("update", off, tolerance, variant=name, unit=of_type(LAST_PLACE, stored), control=control)
    if stored != dtype:
        lab.check("copied back", not_copied(strategy), 0.0, variant=name, control=COPIED_BACK)
    return flat(after)


def of_type(unit: str, dtype: torch.dtype) -> str:
    """`epsilons of bfloat16`."""
    return f"{unit} of {str(dtype).removeprefix('torch.')}"


def not_copied(strategy: Replica) -> float:
    """The largest difference of a weight that computes from what is stepped, rounded to the nearest."""
    computing = flat(strategy.model.parameters())
    wanted = flat([weight.detach().to(dtype_of(strategy)) for weight in remembered(strategy)])
    return (computing - wanted).abs().nan_to_num(math.inf).max().item()


def check_unscaled(lab: Lab, name: str, build: Build, parts: list[Microbatch]) -> None:
    """A power of two changes no digit: the variant in float32 has the gradients of a replica without a scale."""
    model, bucket_bytes = lab.model(torch.float32), lab.config.bucket_mib * 2**20  # of one size: added in one order
    exact = Replica(model, lab.config, GradientBuckets(model.parameters(), lab.mesh.group, bucket_bytes))
    strategy = build(lab.model(torch.float32), lab.mesh, lab.config, dtype=torch.float32)
    assert isinstance(strategy, Replica)
    for each in (strategy, exact):
        each.backward(parts)
    off = (summed(strategy) - summed(exact)).abs().max().item()
    lab.check("unscaled", off, 0.0, variant=name, control=CONTROLS.format("test_gradients_that_are_wrong_fail_the_run"))


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
