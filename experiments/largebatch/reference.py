"""One process that trains by what the papers say, and shares no line with what the ranks run: what decides.

A model, the samples of a step, and below it the formulas themselves, tensor by tensor: rates from the number of the
step, plain SGD, LARS (You et al. 2017, algorithm 1) and LAMB (You et al. 2020, algorithm 2). Their constants are
written down here once more; what this mode chose for itself (base rates, trust, decay) it takes from the recipes.

    factor    1, √k or k at step s; with warm-up over the first W steps 1 + (factor - 1)·s/W
    LARS      v = μv + γλ(g + βw),  w = w - v,  λ = η‖w‖/(‖g‖ + β‖w‖);  η where a norm is zero
    LAMB      m, v as Adam's, m̂ = m/(1 - β1^t), v̂ = v/(1 - β2^t), u = m̂/(√v̂ + ε) + λw
              w = w - γ·min(‖w‖, 10)/‖u‖·u;  w - γu where a norm is zero

Biases and gains (vectors) are neither decayed nor scaled by a norm.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from experiments.largebatch.recipes import LAMB_DECAY, LAMB_RATE, LARS_DECAY, LARS_RATE, LARS_TRUST
from experiments.largebatch.samples import Stream
from workers.workload.model import Model

MOMENTUM = 0.9
FIRST, SECOND, EPSILON, LARGEST_NORM = 0.9, 0.999, 1e-6, 10.0
TARGETS = {"unscaled": 0.0, "sqrt": 0.5, "linear": 1.0, "warmup": 1.0, "lars": 1.0, "lamb": 0.5}  # powers of k
WARMED = ("warmup", "lars", "lamb")


def factor(name: str, k: int, step: int, steps: int) -> float:
    """What the base rate is multiplied with at `step` (from 0) of `steps`; the first quarter warms up."""
    target, warm = math.pow(k, TARGETS[name]), steps // 4
    if name in WARMED and step < warm:
        return 1 + (target - 1) * step / warm
    return target


@dataclass
class State:
    """What a recipe knows of a model between two steps, a tensor a parameter: weights and two moments."""

    weights: list[Tensor]
    first: list[Tensor]  # LARS' momentum, LAMB's m; unused by SGD
    second: list[Tensor]  # LAMB's v

    @classmethod
    def fresh(cls, weights: Sequence[Tensor]) -> "State":
        """Before the first step."""
        own = [weight.detach().clone() for weight in weights]
        return cls(own, *([torch.zeros_like(weight) for weight in own] for _ in range(2)))

    def to(self, dtype: torch.dtype) -> "State":
        """The same in another type."""
        return State(*([each.to(dtype) for each in tensors] for tensors in (self.weights, self.first, self.second)))

    def stepped(self, name: str, gradients: Sequence[Tensor], rate: float, t: int) -> "State":
        """The state after step `t` (from 1) at `rate`."""
        rows = []
        for w, g, first, second in zip(self.weights, gradients, self.first, self.second, strict=True):
            if name == "lars":
                rows.append((*lars(w, g, first, rate), second))
            elif name == "lamb":
                rows.append(lamb(w, g, first, second, rate, t))
            else:
                rows.append((w - rate * g, first, second))
        weights, firsts, seconds = ([row[place] for row in rows] for place in range(3))
        return State(weights, firsts, seconds)


def lars(w: Tensor, g: Tensor, v: Tensor, rate: float) -> tuple[Tensor, Tensor]:
    """w and v after a step."""
    if w.dim() < 2:
        v = MOMENTUM * v + rate * g
        return w - v, v
    size, slope = length(w), length(g)
    ratio = size / (slope + LARS_DECAY * size) if size > 0 and slope > 0 else 1.0
    v = MOMENTUM * v + rate * (LARS_TRUST * ratio) * (g + LARS_DECAY * w)
    return w - v, v


def lamb(w: Tensor, g: Tensor, m: Tensor, v: Tensor, rate: float, t: int) -> tuple[Tensor, Tensor, Tensor]:
    """w, m and v after step t."""
    m = FIRST * m + (1 - FIRST) * g
    v = SECOND * v + (1 - SECOND) * g * g
    u = (m / (1 - FIRST**t)) / ((v / (1 - SECOND**t)) ** 0.5 + EPSILON)
    if w.dim() < 2:
        return w - rate * u, m, v
    u = u + LAMB_DECAY * w
    size, step = length(w), length(u)
    ratio = min(size, LARGEST_NORM) / step if size > 0 and step > 0 else 1.0
    return w - rate * ratio * u, m, v


def length(tensor: Tensor) -> float:
    """Its Euclidean norm."""
    return math.sqrt(float((tensor * tensor).sum()))


def rate_of(name: str, sgd_rate: float, k: int, step: int, steps: int) -> float:
    """The learning rate γ of a recipe at `step` of `steps`."""
    base = {"lars": LARS_RATE, "lamb": LAMB_RATE}.get(name, sgd_rate)
    return base * factor(name, k, step, steps)


def gradients(model: Model, stream: Stream, k: int, step: int, parts: int = 1) -> list[Tensor]:
    """Of the mean loss over the k·LAB_BATCH samples that are due at `step`, computed in so many `parts`."""
    batch = k * stream.config.batch
    due = slice(step * batch, (step + 1) * batch)
    found = [torch.zeros_like(parameter) for parameter in model.parameters()]
    for inputs, targets in zip(stream.inputs[due].chunk(parts), stream.targets[due].chunk(parts), strict=True):
        model.zero_grad()
        (model(inputs, targets) / (batch * stream.terms)).backward()
        for total, parameter in zip(found, model.parameters(), strict=True):
            if parameter.grad is not None:
                total += parameter.grad
    return found


@torch.no_grad()
def put(model: Model, weights: Sequence[Tensor]) -> None:
    """Give a model these weights."""
    for parameter, weight in zip(model.parameters(), weights, strict=True):
        parameter.copy_(weight)
