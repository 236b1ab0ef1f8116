"""One process that trains the same steps in the same type, and how far rounding alone may lead away from it.

Ranks add up in another order than one process does, so their losses part by rounding, and what parts grows from step to
step: by how much depends on the type, the number of terms and steps, the learning rate and the loss's curvature. No
formula in these alone bounds it tightly enough to see a mistake in 16 bits. So a twin is trained beside it, on rank 1,
while rank 0 would work alone anyway: it begins with every weight moved by one unit in its last place, and adds each
batch up in as many parts as the ranks do. By what that changes, up to a step, MARGIN times, may the ranks be off there;
and by the rounding of the loss itself, a sum of n terms, which Higham and Mary (2019, "A New Approach to Probabilistic
Rounding Error Analysis", theorem 2.4) bound by sqrt(n) units.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from distlab.config import Config
from distlab.contract import OneProcess
from distlab.lab import Lab
from distlab.measure.tensors import Off, distance
from distlab.workload import reference
from distlab.workload.data import Batches
from distlab.workload.model import Model
from distlab.workload.reference import Losses

# Ranks were off by up to twice what the twin is, in all modes, models and types; mistakes by 100 times that and more.
MARGIN = 8.0


@dataclass(frozen=True)
class ReferenceRun:
    """One process, on rank 0."""

    losses: list[float]  # of every step
    allowed: list[float]  # by how much a rank's may differ, up to the step at which a loss is no number any more
    gradients: dict[str, float]  # the norm of each parameter's first gradient
    rounding: dict[str, float]  # and of what rounding may change of it


def one_process(
    lab: Lab, batches: Batches, dtype: torch.dtype, train: OneProcess = reference.losses
) -> ReferenceRun | None:
    """The one process on rank 0, its twin on rank 1; None on all other ranks, or without the proof, since a model may
    not fit into one process."""
    lab.at(0, "one process")
    steps = lab.config.steps if lab.config.proof else 0
    parts = max(2, lab.world_size * lab.config.num_microbatches)
    own: Losses | None = None
    twin: list[float] = []
    if steps and lab.rank == 0:
        own = trained(lab, dtype, batches, train)
        other = train(moved_by_one_unit(lab, dtype), batches, lab.config, 1, parts=parts).first
        away = {name: distance(gradient, other[name]) for name, gradient in own.first.items()}
    if steps and lab.rank == min(1, lab.world_size - 1):
        twin = train(moved_by_one_unit(lab, dtype), batches, lab.config, steps, parts=parts).values
    twins = lab.exchange.everyone("one process", twin)
    if own is None:
        return None
    terms = batches.batch * batches.samples.terms
    unit = torch.finfo(torch.promote_types(dtype, torch.float32)).eps * math.sqrt(terms)
    norms = {name: gradient.double().norm().item() for name, gradient in own.first.items()}
    rounding = {name: MARGIN * value + unit * norms[name] for name, value in away.items()}
    return ReferenceRun(own.values, allowed(own.values, next(filter(None, twins)), unit), norms, rounding)


def trained(lab: Lab, dtype: torch.dtype, batches: Batches, train: OneProcess) -> Losses:
    """The one process, which all others wait for: each of its batches goes through the model whole, and is counted."""
    model = lab.model(dtype)
    model.register_forward_hook(lambda *_: lab.work.advance())
    with lab.work.of(lab.config.steps, "steps while the others wait"):
        return train(model, batches, lab.config, lab.config.steps)


def moved_by_one_unit(lab: Lab, dtype: torch.dtype) -> Model:
    """The model, and every weight one unit away."""
    model = lab.model(dtype)
    reference.move_by_a_unit(model, lab.config.seed)
    return model


def allowed(losses: Sequence[float], twin: Sequence[float], unit: float) -> list[float]:
    """Of each step, until one of both is no number: what the twin has been off so far, MARGIN times, and `unit` of the
    loss."""
    bounds: list[float] = []
    apart = largest = 0.0
    for ours, theirs in zip(losses, twin, strict=True):
        if not (math.isfinite(ours) and math.isfinite(theirs)):
            break
        apart, largest = max(apart, abs(ours - theirs)), max(largest, abs(ours))
        bounds.append(MARGIN * apart + unit * largest)
    return bounds


# One update of a tensor, by its published formula: what an audited step has to have done to weights and state.
#
# It shares no line with the optimizers that train (distlab/workload/optimizer.py, torch.optim). AdamW divides a
# gradient by its own size, so that rounding becomes an update where a gradient is nothing but rounding. So what is
# held against one process are its moments, which are linear and square in the gradient; and the weights against the
# formula of the moments that are there (Loshchilov and Hutter 2019, "Decoupled Weight Decay Regularization",
# algorithm 2).
#
# Norms of differences are held, in float64. A number that is stored in a type whose unit is coarse moves by whole
# units or not at all: where it is off by d before it is rounded, it differs after that by a unit in d/unit of all
# cases, so in the norm by sqrt(unit · d).

BETA_1, BETA_2, EPSILON, DECAY = 0.9, 0.999, 1e-8, 0.01  # AdamW's, which the lab does not set
ROUNDINGS = 4  # of an element in one update, at most: decay, ratio, product, sum


def sgd(weight: Tensor, gradient: Tensor, found: Tensor, rounding: float, config: Config) -> dict[str, Off]:
    """`found` is w - lr·g; `rounding` is the norm of what may be wrong with the gradient."""
    wanted = weight.clone().add_(gradient, alpha=-config.learning_rate)
    return {"weights": stored_difference(found, wanted, config.learning_rate * rounding)}


def adamw(
    weight: Tensor, gradient: Tensor, before: dict[str, Tensor], found: Tensor, after: dict[str, Tensor], step: int,
    rounding: float, config: Config,
) -> dict[str, Off]:  # fmt: skip
    """The update after `step` others: moments against the gradient, weights against the moments that are there."""
    taken = (before.get("step"), after.get("step"))
    counts = tuple(0.0 if count is None else count.item() for count in taken)
    if counts != (step, step + 1) or set(after) != {"step", "exp_avg", "exp_avg_sq"}:
        return {"optimizer": Off(math.inf, 0.0)}  # begun anew, or not begun
    first = before.get("exp_avg", torch.zeros_like(found)).lerp(gradient, 1 - BETA_1)
    second = before.get("exp_avg_sq", torch.zeros_like(found)) * BETA_2
    second.addcmul_(gradient, gradient, value=1 - BETA_2)
    largest = gradient.double().abs().max().item()
    squares = 2 * largest * rounding + rounding**2
    moments = [
        stored_difference(after["exp_avg"], first, (1 - BETA_1) * rounding),
        stored_difference(after["exp_avg_sq"], second, (1 - BETA_2) * squares),
    ]
    rate, corrected = config.learning_rate / (1 - BETA_1 ** (step + 1)), math.sqrt(1 - BETA_2 ** (step + 1))
    scale = (after["exp_avg_sq"].sqrt() / corrected).add_(EPSILON)
    wanted = (weight * (1 - config.learning_rate * DECAY)).addcdiv_(after["exp_avg"], scale, value=-rate)
    moved = (wanted.double() - weight.double()).norm().item()
    exact = torch.finfo(torch.promote_types(found.dtype, torch.float32)).eps
    return {
        "optimizer": max(moments, key=lambda each: each.share),
        "weights": stored_difference(found, wanted, ROUNDINGS * exact * moved),
    }


def stored_difference(found: Tensor, wanted: Tensor, uncertain: float) -> Off:
    """The difference of what is stored, where it may be `uncertain` before it is rounded; both as norms."""
    unit = torch.finfo(wanted.dtype).eps
    exact = torch.finfo(torch.promote_types(wanted.dtype, torch.float32)).eps
    size = wanted.double().norm().item()
    inexact = uncertain + ROUNDINGS * exact * size
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return Off(math.inf, 0.0)
    return Off(distance(found, wanted), inexact + math.sqrt(unit * size * inexact))
