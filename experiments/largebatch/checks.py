"""The papers' formulas in one process, and the checks that compare the ranks with them.

A model, the samples of a step, and the formulas tensor by tensor, without any code of the ranks: rates by step number,
plain SGD, LARS (You et al. 2017, algorithm 1) and LAMB (You et al. 2020, algorithm 2). The mode's own choices (base
rates, trust, decay) come from the recipes.

    factor    1, √k or k at step s; with warm-up over the first W steps 1 + (factor - 1)·s/W
    LARS      v = μv + γλ(g + βw),  w = w - v,  λ = η‖w‖/(‖g‖ + β‖w‖);  η where a norm is zero
    LAMB      m, v as Adam's, m̂ = m/(1 - β1^t), v̂ = v/(1 - β2^t), u = m̂/(√v̂ + ε) + λw
              w = w - γ·min(‖w‖, 10)/‖u‖·u;  w - γu where a norm is zero

Biases and gains (vectors) have no decay and no ratio of norms. A step is checked from the state after the previous
step, not from the state that the step itself reports: a recipe that loses its momentum in between fails. The proof
checks the first steps of every recipe in float64, through warm-up and past it, with uneven shards and the base rate of
all proofs; in the sweep, in LAB_DTYPE, first and last steps are checked in the same way (sweep.py).
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

from distlab.lab.lab import Lab
from distlab.lab.measure.tensors import larger, largest_difference, relative_norm
from distlab.lab.verify.proof import TOLERANCE
from distlab.lab.workload.model import build_model
from distlab.lab.workload.reference import LEARNING_RATE, divided, gradients, gradients_of

from .training import (
    LAMB_DECAY,
    LAMB_RATE,
    LARS_DECAY,
    LARS_RATE,
    LARS_TRUST,
    Recipe,
    Stream,
    Trainee,
    base_rate,
)

K, STEPS, HORIZON = 4, 3, 8  # of 8 steps a quarter warms up: base rate, between, full rate
LAYER_STEPS = 4
RATE_TOLERANCE = 1e-9  # relative: an update of 1e-3 of a weight leaves 13 of its 16 digits
# In epsilons of LAB_DTYPE. Gradients: n roundings of half an epsilon add up to √n/2 if they are independent, 45 for the
# 512 samples of 16 numbers of the largest batch. Sweeps of three ranks reached 1.3 in float32, diverging ones among
# them; another batch's gradient is off by about its own size, 8e6 epsilons of float32 and 128 of bfloat16.
GRADIENTS = 64.0
# The formula rounds some ten times, each by half an epsilon of weight, moment or step; the same sweeps reached 3.1.
WEIGHTS = 8.0

# --- the formulas ---

MOMENTUM = 0.9
FIRST, SECOND, EPSILON, LARGEST_NORM = 0.9, 0.999, 1e-6, 10.0
TARGETS = {"unscaled": 0.0, "linear": 1.0, "warmup": 1.0, "lars": 1.0, "lamb": 0.5, "plain": 1.0}  # powers of k
WARMUP_RECIPES, LAYERWISE = ("warmup", "lars", "lamb", "plain"), ("lars", "lamb")


def rate_of(name: str, sgd_rate: float, k: int, step: int, steps: int) -> float:
    """Return the learning rate of a recipe at `step` (from 0) of `steps`; the first quarter warms up."""
    base = {"lars": LARS_RATE, "lamb": LAMB_RATE}.get(name, sgd_rate)
    target, warm = math.pow(k, TARGETS[name]), steps // 4
    return base * (1 + (target - 1) * step / warm if name in WARMUP_RECIPES and step < warm else target)


class Row(NamedTuple):
    """A parameter between two steps: its weight and two moments."""

    weight: Tensor
    first: Tensor  # LARS' momentum, LAMB's m; unused by SGD
    second: Tensor  # LAMB's v


State = list[Row]  # of a model, one row per parameter


def state_of(trainee: Trainee) -> State:
    """Return a copy of a training's weights and moments; moments that do not exist yet are zero."""
    rows = []
    for weight in trainee.model.parameters():
        zeros, state = torch.zeros_like(weight), trainee.optimizer.state.get(weight, {})
        moments = state.get("momentum", state.get("m", zeros)), state.get("v", zeros)
        rows.append(Row(*(each.detach().clone() for each in (weight, *moments))))
    return rows


def stepped(rows: State, name: str, gradients: Sequence[Tensor], rate: float, t: int) -> State:
    """Return the state after step `t` (from 1) of a recipe at `rate`."""
    found = []
    for (w, first, second), g in zip(rows, gradients, strict=True):
        if name == "lars":
            found.append(Row(*lars(w, g, first, rate), second))
        elif name == "lamb":
            found.append(Row(*lamb(w, g, first, second, rate, t)))
        else:
            found.append(Row(w - rate * g, first, second))
    return found


def lars(w: Tensor, g: Tensor, v: Tensor, rate: float) -> tuple[Tensor, Tensor]:
    """Return w and v after a step."""
    if w.dim() < 2:
        v = MOMENTUM * v + rate * g
        return w - v, v
    size, slope = length(w), length(g)
    ratio = size / (slope + LARS_DECAY * size) if size > 0 and slope > 0 else 1.0
    v = MOMENTUM * v + rate * (LARS_TRUST * ratio) * (g + LARS_DECAY * w)
    return w - v, v


def lamb(w: Tensor, g: Tensor, m: Tensor, v: Tensor, rate: float, t: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return w, m and v after step t."""
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
    return math.sqrt(float((tensor * tensor).sum()))


def gradients_alone(trainee: Trainee, before: State, step: int, parts: int) -> list[Tensor]:
    """Return the mean loss's gradient over the k·LAB_BATCH samples of `step`, by one process in `parts`."""
    stream = trainee.stream
    model = build_model(stream.config, stream.config.seed).to(stream.device, stream.dtype)
    weights = {name: row.weight for (name, _), row in zip(model.named_parameters(), before, strict=True)}
    return gradients(model, divided(stream.full(step), parts), weights)[1]


# --- checks of a step ---


def check_step(lab: Lab, name: str, trainee: Trainee, before: State, step: int, *, proof: bool) -> None:
    """Compare gradients and new weights of a `step` from the state `before` with one process."""
    stream, kind = trainee.stream, "" if proof else "trained "
    wanted = gradients_alone(trainee, before, step, 1 if proof else lab.world_size)
    if not all(bool(tensor.isfinite().all()) for tensor in wanted):
        for check in ("trained gradients", "trained weights"):
            lab.waive(check, "the recipe diverged: the numbers of one process are not finite either", name)
        return
    eps = torch.finfo(stream.dtype).eps
    gradient_tolerance, weight_tolerance = (TOLERANCE, TOLERANCE) if proof else (GRADIENTS * eps, WEIGHTS * eps)
    summed = [gradient.double() for gradient in gradients_of(trainee.model)]
    mine, other = (parameters_to_vector(each) for each in (summed, [gradient.double() for gradient in wanted]))
    detail = f"step {step} of k = {trainee.k}; norm of the difference over the norm of the gradient"
    lab.check(f"{kind}gradients", relative_norm(mine - other, other.norm()), gradient_tolerance, name, detail)
    rate = rate_of(name, base_rate(stream.config), trainee.k, step, trainee.steps)
    exact, found = ([Row(*(each.double() for each in row)) for row in rows] for rows in (before, state_of(trainee)))
    off = 0.0
    for rows in zip(exact, found, stepped(exact, name, summed, rate, step + 1), strict=True):
        for start, now, expected in zip(*rows, strict=True):
            off = larger(off, relative_norm(now - expected, torch.maximum(start.norm(), expected.norm())))
    detail = f"step {step} of k = {trainee.k}; weights and moments, relative to their norm"
    lab.check(f"{kind}weights", off, weight_tolerance, name, detail)


def prove(lab: Lab, recipes: Mapping[str, Recipe]) -> None:
    """Compare gradients, weights and rates of the first steps of every recipe with one process."""
    config = lab.config.model_copy(update={"lr": LEARNING_RATE})
    stream = Stream(config, config.seed, K * STEPS, lab.device, torch.float64, uneven=True)
    for name, recipe in recipes.items():
        model = build_model(config, config.seed).to(lab.device, torch.float64)
        trainee = Trainee(model, stream, recipe, K, HORIZON, config, lab.group)
        for step in range(STEPS):
            lab.at(step, f"proof of {name}")
            before = state_of(trainee)
            trainee.backward(step)
            trainee.update(step)
            if lab.rank == 0:
                check_step(lab, name, trainee, before, step, proof=True)
                if name not in LAYERWISE:
                    check_rate(lab, name, trainee, before, rate_of(name, LEARNING_RATE, K, step, HORIZON))
            lab.stepped()
            lab.exchange.barrier("one process")


def check_rate(lab: Lab, name: str, trainee: Trainee, before: State, right: float) -> None:
    """Check the rate of plain SGD's step: the length of the update along the gradient, -<Δw, g> / <g, g>."""
    model = trainee.model
    weights, start, gradient = (
        parameters_to_vector(each).detach()
        for each in (model.parameters(), [row.weight for row in before], gradients_of(trainee.model))
    )
    measured = -((weights - start) @ gradient / (gradient @ gradient)).item()
    detail = f"{measured:.4g} measured, {right:.4g} by the formula; the difference is relative"
    lab.check("learning rate", abs(measured / right - 1), RATE_TOLERANCE, variant=name, detail=detail)


# --- LARS and LAMB on extreme layers ---


def drawn_layers(seed: int, device: torch.device) -> list[Tensor]:
    """Return five matrices and a bias of normal numbers, float64."""
    draw = torch.Generator().manual_seed(seed)
    shapes = [(6, 5), (4, 3), (3, 7), (5, 4), (7, 2), (5,)]  # [rows, columns]
    return [torch.randn(shape, generator=draw, dtype=torch.float64).to(device) for shape in shapes]


def check_layers(lab: Lab, name: str, recipe: Recipe) -> None:
    """Check some steps of LARS or LAMB on layers that are extreme for their formulas: whole on every rank, and with
    some rows on each, where the norm is that of all parts."""
    weights = drawn_layers(lab.config.seed, lab.device)
    weights[1] = torch.zeros_like(weights[1])
    weights[3] *= 40 / weights[3].norm()
    rate = rate_of(name, 1.0, 1, 0, 1)
    wanted = [Row(each, torch.zeros_like(each), torch.zeros_like(each)) for each in weights]
    full, parts = (nn.ParameterList(each.clone() for each in tensors) for tensors in (weights, own_rows(weights, lab)))
    optimizers = (recipe.optimizer(full, lab.config), recipe.optimizer(parts, lab.config, sharded_over=lab.group))
    for step in range(LAYER_STEPS):
        drawn = [0.1 * each for each in drawn_layers(1000 + step, lab.device)]
        drawn[2] = torch.zeros_like(drawn[2])
        drawn[4] = -1e-3 * weights[4]  # where ‖g + βw‖ is far from ‖g‖ + β‖w‖
        for parameter, gradient in zip((*full, *parts), (*drawn, *own_rows(drawn, lab)), strict=True):
            parameter.grad = gradient.clone()
        for optimizer in optimizers:
            optimizer.step()
        wanted = stepped(wanted, name, drawn, rate, step + 1)
    after = [row.weight for row in wanted]
    detail = "a layer of zeros, one with a zero gradient, one of norm 40, one with a gradient opposite to its weights"
    lab.check("layers", largest_error(full, after), TOLERANCE, name, detail)
    detail = "the same layers, with some of the rows on each rank"
    lab.check("global norms", largest_error(parts, own_rows(after, lab)), TOLERANCE, name, detail)


def own_rows(tensors: Iterable[Tensor], lab: Lab) -> list[Tensor]:
    """Return this rank's rows of each tensor: uneven, and maybe empty."""
    return [tensor.tensor_split(lab.world_size)[lab.rank] for tensor in tensors]


def largest_error(found: Iterable[Tensor], wanted: Iterable[Tensor]) -> float:
    """Return the largest difference of any tensor."""
    return max(largest_difference(one, other) for one, other in zip(found, wanted, strict=True))
