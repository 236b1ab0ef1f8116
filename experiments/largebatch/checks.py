"""One process that trains by what the papers say, and the checks that hold the ranks to it.

A model, the samples of a step, and the formulas themselves, tensor by tensor, that share no line with what the ranks
run: rates from the number of the step, plain SGD, LARS (You et al. 2017, algorithm 1) and LAMB (You et al. 2020,
algorithm 2). What this mode chose for itself (base rates, trust, decay) is taken from the recipes.

    factor    1, √k or k at step s; with warm-up over the first W steps 1 + (factor - 1)·s/W
    LARS      v = μv + γλ(g + βw),  w = w - v,  λ = η‖w‖/(‖g‖ + β‖w‖);  η where a norm is zero
    LAMB      m, v as Adam's, m̂ = m/(1 - β1^t), v̂ = v/(1 - β2^t), u = m̂/(√v̂ + ε) + λw
              w = w - γ·min(‖w‖, 10)/‖u‖·u;  w - γu where a norm is zero

Biases and gains (vectors) are neither decayed nor scaled by a norm. A step is checked from the state that the step
before left, not from the state that the step says it found: a recipe that forgets its momentum in between fails. The
proof checks the first steps of every recipe in float64, through warm-up and past it, with uneven shards and the base
rate of all proofs; the sweep, in LAB_DTYPE, has sampled steps checked in the same way (sweep.py).
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from distlab.lab import Lab
from distlab.measure.tensors import larger
from distlab.verify.proof import LEARNING_RATE, TOLERANCE
from distlab.workload.model import Model, build_model

from .training import (
    LAMB_DECAY,
    LAMB_RATE,
    LARS_DECAY,
    LARS_RATE,
    LARS_TRUST,
    Lockstep,
    Recipe,
    Stream,
    Trainee,
    base_rate,
)

K, STEPS, HORIZON = 4, 3, 8  # of 8 steps a quarter warms up: the base rate, on the way, the whole rate
LAYER_STEPS = 4
RATE_TOLERANCE = 1e-9  # relative: an update of 1e-3 of a weight leaves 13 of its 16 digits
# In epsilons of LAB_DTYPE. Gradients: n roundings of half an epsilon add up to √n/2 if they are independent, 45 for the
# 512 samples of 16 numbers of the largest batch. Sweeps of three ranks reached 1.3 in float32, diverging ones among
# them; another batch's gradient is off by about its own size, 8e6 epsilons of float32 and 128 of bfloat16.
GRADIENTS = 64.0
# The formula rounds some ten times, each by half an epsilon of weight, moment or step; the same sweeps reached 3.1.
WEIGHTS = 8.0
CONTROLS = "tests/experiments/test_largebatch.py::{}"

# --- the formulas ---

MOMENTUM = 0.9
FIRST, SECOND, EPSILON, LARGEST_NORM = 0.9, 0.999, 1e-6, 10.0
TARGETS = {"unscaled": 0.0, "sqrt": 0.5, "linear": 1.0, "warmup": 1.0, "lars": 1.0, "lamb": 0.5}  # powers of k
WARMED, LAYERWISE = ("warmup", "lars", "lamb"), ("lars", "lamb")


def rate_of(name: str, sgd_rate: float, k: int, step: int, steps: int) -> float:
    """The learning rate of a recipe at `step` (from 0) of `steps`; the first quarter warms up."""
    base = {"lars": LARS_RATE, "lamb": LAMB_RATE}.get(name, sgd_rate)
    target, warm = math.pow(k, TARGETS[name]), steps // 4
    return base * (1 + (target - 1) * step / warm if name in WARMED and step < warm else target)


@dataclass
class State:
    """A model between two steps of a recipe, a tensor a parameter: weights and two moments."""

    weights: list[Tensor]
    first: list[Tensor]  # LARS' momentum, LAMB's m; unused by SGD
    second: list[Tensor]  # LAMB's v

    @classmethod
    def fresh(cls, weights: Iterable[Tensor]) -> "State":
        """Before the first step."""
        own = [weight.detach().clone() for weight in weights]
        return cls(own, *([torch.zeros_like(weight) for weight in own] for _ in range(2)))

    @classmethod
    def of(cls, trainee: Trainee) -> "State":
        """A copy of a training's weights and moments; moments that it has not made yet are zero."""
        found = cls.fresh(trainee.model.parameters())
        state = trainee.optimizer.state
        for key, moments in (("momentum", found.first), ("m", found.first), ("v", found.second)):
            for place, weight in enumerate(trainee.model.parameters()):
                if key in state.get(weight, {}):
                    moments[place] = state[weight][key].detach().clone()
        return found

    @property
    def tensors(self) -> list[Tensor]:
        """All weights, then the first and the second moments."""
        return [*self.weights, *self.first, *self.second]

    def double(self) -> "State":
        """The same in float64."""
        return State(*([each.double() for each in tensors] for tensors in (self.weights, self.first, self.second)))

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
        return State(*([row[place] for row in rows] for place in range(3)))


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


def gradients_of(weights: Sequence[Tensor], stream: Stream, k: int, step: int, parts: int) -> list[Tensor]:
    """At `weights`, of the mean loss over the k·LAB_BATCH samples that are due at `step`, computed in `parts`."""
    model = build_model(stream.config, stream.config.seed).to(stream.device, stream.dtype)
    for parameter, weight in zip(model.parameters(), weights, strict=True):
        parameter.data.copy_(weight)
    batch = k * stream.config.batch
    due = slice(step * batch, (step + 1) * batch)
    for inputs, targets in zip(stream.inputs[due].chunk(parts), stream.targets[due].chunk(parts), strict=True):
        (model(inputs, targets) / (batch * stream.terms)).backward()
    return [p.grad if p.grad is not None else torch.zeros_like(p) for p in model.parameters()]


# --- what a step is checked for ---


def check_step(lab: Lab, name: str, trainee: Trainee, before: State, step: int, *, proof: bool) -> None:
    """Gradients and new weights of a training that took `step` from the state `before`, against one process."""
    stream, kind = trainee.stream, "" if proof else "trained "
    parts = 1 if proof else lab.world_size
    wanted, summed = gradients_of(before.weights, stream, trainee.k, step, parts), trainee.gradients()
    if not all(bool(tensor.isfinite().all()) for tensor in wanted):
        for claim in ("trained gradients", "trained weights"):
            lab.waive(claim, "a recipe that diverged: one process has no number there either", name)
        return
    eps = torch.finfo(stream.dtype).eps
    of_gradients, of_weights = (TOLERANCE, TOLERANCE) if proof else (GRADIENTS * eps, WEIGHTS * eps)
    mine, other = (torch.cat([tensor.double().flatten() for tensor in each]) for each in (summed, wanted))
    off = relative(mine, other, other.norm())
    detail = f"step {step} of k = {trainee.k}; length of the difference over that of the gradient"
    control = CONTROLS.format(
        "test_samples_of_another_step_fail_the_run" if proof else "test_a_sweep_on_one_batch_fails_the_run"
    )
    lab.check(f"{kind}gradients", off, of_gradients, name, detail, control=control)
    rate, exact = rate_of(name, base_rate(stream.config), trainee.k, step, trainee.steps), before.double()
    right = exact.stepped(name, [tensor.double() for tensor in summed], rate, step + 1)
    off = 0.0
    for start, found, due in zip(exact.tensors, State.of(trainee).double().tensors, right.tensors, strict=True):
        off = larger(off, relative(found, due, torch.maximum(start.norm(), due.norm())))
    detail = f"step {step} of k = {trainee.k}; of weights and moments, as a share of their length"
    control = CONTROLS.format(
        "test_a_term_that_is_missing_fails_the_run" if proof else "test_a_sweep_that_forgets_fails_the_run"
    )
    lab.check(f"{kind}weights", off, of_weights, name, detail, control=control)


def relative(found: Tensor, wanted: Tensor, size: Tensor) -> float:
    """The length of the difference as a share of `size`."""
    return float((found - wanted).norm() / size.clamp(min=torch.finfo(torch.float64).tiny))


def prove(lab: Lab, recipes: Mapping[str, Recipe]) -> None:
    """Gradients, weights and rates of the first steps of every recipe, against one process."""
    config = lab.config.model_copy(update={"lr": LEARNING_RATE})
    stream = Stream(config, config.seed, K * STEPS, lab.device, torch.float64)
    trainees = {
        name: Trainee(
            build_model(config, config.seed).to(lab.device, torch.float64), stream, recipe, K, HORIZON, config
        )
        for name, recipe in recipes.items()
    }
    ours = Lockstep(trainees, lab.group, uneven=True)
    for step in range(STEPS):
        lab.at(step, "proof")
        before = {name: State.of(trainee) for name, trainee in trainees.items()}
        ours.backward(step)
        ours.update(step)
        lab.at(step, "one process")
        for name, trainee in trainees.items() if lab.rank == 0 else ():
            check_step(lab, name, trainee, before[name], step, proof=True)
            if name not in LAYERWISE:
                check_rate(lab, name, trainee, before[name], rate_of(name, LEARNING_RATE, K, step, HORIZON))
        lab.stepped()
        lab.exchange.barrier("one process")


def check_rate(lab: Lab, name: str, trainee: Trainee, before: State, right: float) -> None:
    """The rate of plain SGD's step, as the length of the update along the gradient, -<Δw, g> / <g, g>."""
    weights, start, gradient = (
        nn.utils.parameters_to_vector(each).detach()
        for each in (trainee.model.parameters(), before.weights, trainee.gradients())
    )
    measured = -((weights - start) @ gradient / (gradient @ gradient)).item()
    detail = f"{measured:.4g} measured, {right:.4g} by the formula; the difference is relative"
    lab.check("learning rate", abs(measured / right - 1), RATE_TOLERANCE, variant=name, detail=detail)


# --- LARS and LAMB on layers that no model begins with ---


def drawn_layers(seed: int) -> list[Tensor]:
    """Five matrices and a bias of normal numbers, float64."""
    draw = torch.Generator().manual_seed(seed)
    shapes = [(6, 5), (4, 3), (3, 7), (5, 4), (7, 2), (5,)]  # [rows, columns]
    return [torch.randn(shape, generator=draw, dtype=torch.float64) for shape in shapes]


def check_layers(lab: Lab, name: str, recipe: Recipe) -> None:
    """A few steps of LARS or LAMB on layers at the corners of their formulas: whole on every rank, and with some rows
    on each, where the norm of a weight is that of all parts."""
    weights = drawn_layers(lab.config.seed)
    weights[1] = torch.zeros_like(weights[1])
    weights[3] *= 40 / weights[3].norm()
    wanted, rate = State.fresh(weights), rate_of(name, 1.0, 1, 0, 1)
    whole, parts = layers(weights), layers([own_rows(each, lab) for each in weights])
    optimizers = (recipe.optimizer(whole, lab.config), recipe.optimizer(parts, lab.config, sharded_over=lab.group))
    for step in range(LAYER_STEPS):
        gradients = [0.1 * each for each in drawn_layers(1000 + step)]
        gradients[2] = torch.zeros_like(gradients[2])
        gradients[4] = -1e-3 * weights[4]  # where ‖g + βw‖ is far from ‖g‖ + β‖w‖
        for parameter, part, gradient in zip(whole.parameters(), parts.parameters(), gradients, strict=True):
            parameter.grad, part.grad = gradient.clone(), own_rows(gradient, lab).clone()
        for optimizer in optimizers:
            optimizer.step()
        wanted = wanted.stepped(name, gradients, rate, step + 1)
    detail = "a layer of zeros, one without a gradient, one of norm 40, one whose gradient points against its weights"
    control = CONTROLS.format("test_a_corner_that_is_wrong_fails_the_run")
    lab.check("layers", largest_difference(whole, wanted.weights), TOLERANCE, name, detail, control=control)
    detail = "of the same layers, each rank with some rows of them"
    control = CONTROLS.format("test_norms_of_a_rank_alone_fail_the_run")
    rows = [own_rows(each, lab) for each in wanted.weights]
    lab.check("global norms", largest_difference(parts, rows), TOLERANCE, name, detail, control=control)


def layers(weights: Sequence[Tensor]) -> Model:
    """A model of these weights, which is never run."""
    return Model("layers", [nn.ParameterList([nn.Parameter(each.clone()) for each in weights])], nn.Identity())


def own_rows(tensor: Tensor, lab: Lab) -> Tensor:
    """This rank's part, a run of rows: parts are uneven, and may be empty."""
    return tensor.tensor_split(lab.world_size)[lab.rank]


def largest_difference(model: Model, wanted: Sequence[Tensor]) -> float:
    """The largest difference of any weight, infinite where one is no number."""
    pairs = zip(model.parameters(), wanted, strict=True)
    differences = [(mine.detach() - other).abs().flatten() for mine, other in pairs]
    return torch.cat([*differences, torch.zeros(1)]).nan_to_num(torch.inf).max().item()
