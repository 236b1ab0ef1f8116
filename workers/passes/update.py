"""One update of a tensor, by its published formula: what an audited step has to have done to weights and state.

It shares no line with the optimizers that train (workers/workload/optimizer.py, torch.optim). AdamW divides a gradient
by its own size, so that rounding becomes an update where a gradient is nothing but rounding. So what is held against
one process are its moments, which are linear and square in the gradient; and the weights against the formula of the
moments that are there (Loshchilov and Hutter 2019, "Decoupled Weight Decay Regularization", algorithm 2).

Norms of differences are held, in float64. A number that is stored in a type whose unit is coarse moves by whole units
or not at all: where it is off by d before it is rounded, it differs after that by a unit in d/unit of all cases, so in
the norm by sqrt(unit · d).
"""

import math

import torch
from torch import Tensor

from workers.config import Config
from workers.measure.difference import Off, distance

BETA_1, BETA_2, EPSILON, DECAY = 0.9, 0.999, 1e-8, 0.01  # AdamW's, which the lab does not set
ROUNDINGS = 4  # of an element in one update, at most: decay, ratio, product, sum


def sgd(weight: Tensor, gradient: Tensor, found: Tensor, rounding: float, config: Config) -> dict[str, Off]:
    """`found` is w - lr·g; `rounding` is the norm of what may be wrong with the gradient."""
    wanted = weight.clone().add_(gradient, alpha=-config.learning_rate)
    return {"weights": off(found, wanted, config.learning_rate * rounding)}


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
        off(after["exp_avg"], first, (1 - BETA_1) * rounding),
        off(after["exp_avg_sq"], second, (1 - BETA_2) * squares),
    ]
    rate, corrected = config.learning_rate / (1 - BETA_1 ** (step + 1)), math.sqrt(1 - BETA_2 ** (step + 1))
    scale = (after["exp_avg_sq"].sqrt() / corrected).add_(EPSILON)
    wanted = (weight * (1 - config.learning_rate * DECAY)).addcdiv_(after["exp_avg"], scale, value=-rate)
    moved = (wanted.double() - weight.double()).norm().item()
    exact = torch.finfo(torch.promote_types(found.dtype, torch.float32)).eps
    return {
        "optimizer": max(moments, key=lambda each: each.share),
        "weights": off(found, wanted, ROUNDINGS * exact * moved),
    }


def off(found: Tensor, wanted: Tensor, uncertain: float) -> Off:
    """The difference of what is stored, where it may be `uncertain` before it is rounded; both as norms."""
    unit = torch.finfo(wanted.dtype).eps
    exact = torch.finfo(torch.promote_types(wanted.dtype, torch.float32)).eps
    size = wanted.double().norm().item()
    inexact = uncertain + ROUNDINGS * exact * size
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return Off(math.inf, 0.0)
    return Off(distance(found, wanted), inexact + math.sqrt(unit * size * inexact))
