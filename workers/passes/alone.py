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

from workers.contract import OneProcess
from workers.lab import Lab
from workers.measure.difference import distance
from workers.workload import baseline
from workers.workload.baseline import Losses
from workers.workload.data import Batches
from workers.workload.model import Model

# Ranks were off by up to twice what the twin is, in all modes, models and types; mistakes by 100 times that and more.
MARGIN = 8.0


@dataclass(frozen=True)
class Alone:
    """One process, on rank 0."""

    losses: list[float]  # of every step
    allowed: list[float]  # by how much a rank's may differ, up to the step at which a loss is no number any more
    gradients: dict[str, float]  # the norm of each parameter's first gradient
    rounding: dict[str, float]  # and of what rounding may change of it


def one_process(lab: Lab, batches: Batches, dtype: torch.dtype, train: OneProcess = baseline.losses) -> Alone | None:
    """The one process on rank 0, its twin on rank 1; None on all other ranks, or without the proof, since a model may
    not fit into one process."""
    lab.at(0, "one process")
    steps = lab.config.steps if lab.config.proof else 0
    parts = max(2, lab.world_size * lab.config.num_microbatches)
    own: Losses | None = None
    twin: list[float] = []
    if steps and lab.rank == 0:
        own = trained(lab, dtype, batches, train)
        other = train(moved(lab, dtype), batches, lab.config, 1, parts=parts).first
        away = {name: distance(gradient, other[name]) for name, gradient in own.first.items()}
    if steps and lab.rank == min(1, lab.world_size - 1):
        twin = train(moved(lab, dtype), batches, lab.config, steps, parts=parts).values
    twins = lab.exchange.everyone("one process", twin)
    if own is None:
        return None
    terms = batches.batch * batches.samples.terms
    unit = torch.finfo(torch.promote_types(dtype, torch.float32)).eps * math.sqrt(terms)
    norms = {name: gradient.double().norm().item() for name, gradient in own.first.items()}
    rounding = {name: MARGIN * value + unit * norms[name] for name, value in away.items()}
    return Alone(own.values, allowed(own.values, next(filter(None, twins)), unit), norms, rounding)


def trained(lab: Lab, dtype: torch.dtype, batches: Batches, train: OneProcess) -> Losses:
    """The one process, which all others wait for: each of its batches goes through the model whole, and is counted."""
    model = lab.model(dtype)
    model.register_forward_hook(lambda *_: lab.work.advance())
    with lab.work.of(lab.config.steps, "steps while the others wait"):
        return train(model, batches, lab.config, lab.config.steps)


def moved(lab: Lab, dtype: torch.dtype) -> Model:
    """The model, and every weight one unit away."""
    model = lab.model(dtype)
    baseline.move_by_a_unit(model, lab.config.seed)
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
