"""The proof of the 16-bit variants: what can be exact is exact, and the rest is within a few units of the format.

  gradients          N ranks against one process of the same arithmetic: only the order of sums differs
  float64 gradients  against the exact ones at the same weights, where nothing underflows: not for plain fp16
  given              what the optimizer is given is what was summed, without the scale, to the bit
  clipped gradients  with LAB_CLIP: what the optimizer is given, unscaled and clipped, against what was summed, clipped
  update             weights against w - lr·g of the gradient that was given, from the weights that the last step left,
                     in units in the last place: half a unit to the nearest, up to one at random (rehearsal.py)
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
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from distlab.contract import Build
from distlab.data_parallel.buckets import GradientBuckets
from distlab.data_parallel.strategy import Replica
from distlab.lab import Lab
from distlab.measure.tensors import largest, largest_difference
from distlab.precision.mixed_precision import Masters, ulp
from distlab.verify.proof import check_replicas, summed_losses
from distlab.workload.data import Batches, Microbatch
from distlab.workload.model import Model
from distlab.workload.optimizer import PlainSGD
from distlab.workload.reference import backward as backward_alone

from .predictions import SCALED, converted

# What 16 bits lost on the way: gradients that became zero, that left the range, and updates that left no trace.
#
# Each variant is trained anew and looked at around each update, which the timed steps do not pay for. What underflows
# is seen against the float32 gradient of the same samples at the same weights, element by element.


@dataclass
class TrainingTrace:
    """One variant's training: a value a step, of all P elements."""

    shares: list[float | None] = field(default_factory=list)  # of the loss, this rank's
    losses: list[float] = field(default_factory=list)  # of the batch, on rank 0
    scales: list[float] = field(default_factory=list)
    overflowed: list[int] = field(default_factory=list)  # elements of the gradient that are inf or NaN
    # Share that is zero, and is not in float32: first and last step.
    underflowed: list[float] = field(default_factory=list)
    # Share of nonzero gradients whose update left the weight as it was.
    vanished: list[float] = field(default_factory=list)
    skipped: int = 0


def observe(lab: Lab, name: str, build: Build) -> TrainingTrace:
    """Train LAB_STEPS steps, and look."""
    batches, seen = lab.batches(torch.float32), TrainingTrace()
    strategy = build(lab.model(torch.float32), lab.mesh, lab.config)
    assert isinstance(strategy, Replica)
    exact = exact_replica(lab)
    for step in range(lab.config.steps):
        lab.at(step, f"{name} observed")
        parts = lab.dealt(batches, step)
        seen.scales.append(strategy.scale)
        seen.shares.append(strategy.backward(parts).item())
        gradient = gradient_of(strategy)
        seen.overflowed.append(int((~gradient.isfinite()).sum()))
        if step in (0, lab.config.steps - 1):
            lost = (gradient == 0) & (gradient_at(strategy, exact, parts) != 0)
            seen.underflowed.append(math.nan if seen.overflowed[-1] else lost.double().mean().item())
        before = flat(remembered(strategy))
        strategy.update()
        if strategy.scale < seen.scales[-1]:
            seen.skipped += 1
        elif not seen.overflowed[-1]:
            moved = gradient != 0
            unmoved = (flat(remembered(strategy)) == before) & moved
            seen.vanished.append((unmoved.sum() / moved.sum().clamp(min=1)).item())
        lab.work.advance()
    seen.losses = summed_losses(lab, seen.shares)
    return seen


def exact_replica(lab: Lab) -> Replica:
    """A replica in float32, for its gradients alone."""
    model = lab.model(torch.float32)
    return Replica(model, lab.config, GradientBuckets(model.parameters(), lab.group, float("inf"), overlap=False))


@torch.no_grad()
def copy_weights(source: Replica, target: Replica) -> None:
    for theirs, ours in zip(source.model.parameters(), target.model.parameters(), strict=True):
        ours.copy_(theirs)


def gradient_at(strategy: Replica, exact: Replica, parts: list[Microbatch]) -> Tensor:
    """The float32 gradient over all ranks, at the weights that `strategy` computes with."""
    copy_weights(strategy, exact)
    exact.backward(parts)
    return gradient_of(exact)


def gradient_of(replica: Replica) -> Tensor:
    """The summed gradient as it stands, with its scale, as one vector."""
    return flat(parameter.grad for parameter in replica.model.parameters())


def remembered(replica: Replica) -> list[nn.Parameter]:
    """The weights from which the next update starts: masters that are kept, or those that compute."""
    masters: Masters | None = getattr(replica, "masters", None)
    return masters.parameters if masters and masters.kept else list(replica.model.parameters())


def flat(tensors: Iterable[Tensor | None]) -> Tensor:
    """A copy of all numbers of some tensors as one vector in float64."""
    return torch.cat([tensor.detach().double().flatten() for tensor in tensors if tensor is not None])


SAME_ARITHMETIC, EXACT = 8.0, 16.0  # epsilons: sums in another order; all roundings of a forward and a backward pass
# To the nearest: half a unit of the 16 bits, and half a unit of the float32 that is rounded, 2^-13 of them in fp16.
NEAREST = 0.5 + 2.0**-14
# Rounded at random, or twice: fp16 rounds lr·g as well, where it ends, by half a unit of a weight that is as small.
WHOLE = 1.0
CONTROLS = "tests/experiments/test_precision.py::{}"
LAST_PLACE = "units in the last place"
WRONG_MASTERS = CONTROLS.format("test_masters_that_go_wrong_fail_the_run")
WRONG_GRADIENTS = CONTROLS.format("test_gradients_that_are_wrong_fail_the_run")
WRONG_SCALE = CONTROLS.format("test_a_scale_that_stays_in_gradients_fails_the_run")
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
        masters = largest_difference(start, flat(lab.model(torch.float32).parameters()))
        lab.check("first masters", masters, 0.0, name, control=WRONG_MASTERS)
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


def backward(strategy: Replica, parts: list[Microbatch]) -> None:
    """Gradients at the largest scale that they bear: every overflow halves it, as in training."""
    for _ in range(MOST_HALVINGS):
        strategy.backward(parts)
        scaled = getattr(strategy, "loss_scale", None) is not None
        if not scaled or summed_gradient(strategy).isfinite().all():
            return
        strategy.update()


def check_gradients(lab: Lab, name: str, strategy: Replica, batches: Batches, step: int) -> None:
    """The sum over all ranks, on rank 0, against one process in the same arithmetic and in float64."""
    dtype, found, batch = dtype_of(strategy), summed_gradient(strategy), batches.full(step)
    wanted = {"gradients": (one_process(strategy.model, batch, dtype, strategy.scale), SAME_ARITHMETIC)}
    if name != "fp16":
        wanted["float64 gradients"] = one_process(strategy.model, batch, torch.float64, 1.0), EXACT
    for check, (alone, tolerance) in wanted.items():
        off = epsilons(found, alone, dtype)
        lab.check(check, off, tolerance, name, unit=of_type("epsilons", dtype), control=WRONG_GRADIENTS)


def check_update(lab: Lab, name: str, strategy: Replica, witness: Witness, start: Tensor) -> Tensor:
    """What the optimizer is given and what becomes of the weights `start`, on every rank; returns those after it."""
    wanted, dtype = summed_gradient(strategy), dtype_of(strategy)
    witness.given = None
    strategy.update()
    given, after = witness.given, remembered(strategy)
    stored = after[0].dtype
    off, taken = math.inf, "no step was taken"
    if given is not None:
        exact, taken = start - LEARNING_RATE * given, ""
        off = largest((flat(after) - exact) / ulp(exact, stored))
        if strategy.config.clip is None:
            told = "to the optimizer, of what was summed"
            lab.check("given", largest_difference(given, wanted), 0.0, name, told, control=WRONG_SCALE)
        else:
            apart_by = epsilons(given, clipped(wanted, strategy.config.clip), dtype)  # LAB_BUG=unscaled_clip
            lab.check("clipped gradients", apart_by, SAME_ARITHMETIC, name, unit=of_type("epsilons", dtype))
    tolerance = WHOLE if name in ("bf16_stochastic", "fp16") else NEAREST
    lab.check("update", off, tolerance, name, taken, unit=of_type(LAST_PLACE, stored), control=WRONG_MASTERS)
    if stored != dtype:
        rounded = flat(weight.detach().to(dtype) for weight in after)
        copies = largest_difference(flat(strategy.model.parameters()), rounded)
        lab.check("copied back", copies, 0.0, name, control=WRONG_MASTERS)
    return flat(after)


def clipped(gradient: Tensor, clip: float) -> Tensor:
    """The gradient, no longer than `clip`."""
    return gradient.mul(min(1.0, clip / gradient.norm().item()))


def of_type(unit: str, dtype: torch.dtype) -> str:
    """`epsilons of bfloat16`."""
    return f"{unit} of {str(dtype).removeprefix('torch.')}"


def check_unscaled(lab: Lab, name: str, build: Build, parts: list[Microbatch]) -> None:
    """A power of two changes no digit: the variant in float32 has the gradients of a replica without a scale."""
    model, bucket_bytes = lab.model(torch.float32), lab.config.bucket_mib * 2**20  # of one size: added in one order
    exact = Replica(model, lab.config, GradientBuckets(model.parameters(), lab.mesh.group, bucket_bytes))
    strategy = build(lab.model(torch.float32), lab.mesh, lab.config, dtype=torch.float32)
    assert isinstance(strategy, Replica)
    for each in (strategy, exact):
        each.backward(parts)
    lab.check(
        "unscaled",
        largest_difference(summed_gradient(strategy), summed_gradient(exact)),
        0.0,
        name,
        control=WRONG_GRADIENTS,
    )


def one_process(model: Model, batch: Microbatch, dtype: torch.dtype, scale: float) -> Tensor:
    """The unscaled gradient of the batch at the weights of `model`, computed in `dtype`, as a vector in float64."""
    alone, part = copy.deepcopy(model).to(dtype), converted(batch, dtype)
    backward_alone(alone, [part._replace(share=part.share * scale)], None)
    return flat(parameter.grad for parameter in alone.parameters()) / scale


def dtype_of(strategy: Replica) -> torch.dtype:
    """What it computes in."""
    return next(strategy.model.parameters()).dtype


def summed_gradient(strategy: Replica) -> Tensor:
    """The gradient over all ranks as it was summed, unscaled, as a vector in float64."""
    return gradient_of(strategy) / strategy.scale


def epsilons(found: Tensor, wanted: Tensor, dtype: torch.dtype) -> float:
    """The norm of the difference over the norm, in units of the epsilon of `dtype`."""
    off: float = (torch.linalg.vector_norm(found - wanted) / torch.linalg.vector_norm(wanted)).item()
    return off / torch.finfo(dtype).eps
