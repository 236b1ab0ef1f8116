"""The proof: k times the batch on N ranks is what one process computes, and rate and step are what the papers say.

A few steps of every recipe in float64, through warm-up and past it, with shards that are not equally large. Rank 0
takes the same steps alone, on whole batches, by the formulas themselves (reference.py): no optimizer, no rate and no
dealing of samples is shared. The base rate of SGD is that of every proof, whatever LAB_LR is; the rate of a step is
measured, as the length of an update along the gradient, -<Δw, g> / <g, g>. A loss would not show it. LARS and LAMB
then step layers of their own (layers.py).
"""

import copy
from collections.abc import Mapping

import torch
from torch import Tensor

from experiments.largebatch.layers import hold_layers
from experiments.largebatch.lockstep import Lockstep, Trainee
from experiments.largebatch.recipes import Recipe
from experiments.largebatch.reference import State, gradients, put, rate_of
from experiments.largebatch.samples import Stream
from workers.config import Config
from workers.lab import Lab
from workers.passes.proof import LEARNING_RATE, TOLERANCE
from workers.workload.model import Model, build_model

K, STEPS, HORIZON = 4, 3, 8  # of 8 steps a quarter warms up: the base rate, on the way, the whole rate
CONTROL = "tests/experiments/test_largebatch.py::test_a_term_that_is_missing_fails_the_run"
DEALT = "tests/experiments/test_largebatch.py::test_samples_of_another_step_fail_the_run"
RATE_TOLERANCE = 1e-9  # relative: an update of 1e-3 of a weight leaves 13 of its 16 digits


def prove(lab: Lab, config: Config, followed: Mapping[str, Recipe]) -> None:
    """Gradients, weights and rates of every recipe in `followed`, against one process."""
    config = config.model_copy(update={"lr": LEARNING_RATE})
    stream = Stream(config, config.seed, K * STEPS, lab.device, torch.float64)
    dense = build_model(config, config.seed).to(lab.device, torch.float64)
    trainees = [Trainee(copy.deepcopy(dense), stream, each, K, HORIZON, config) for each in followed.values()]
    ours = Lockstep(dict(zip(followed, trainees, strict=True)), lab.group, uneven=True)
    alone = {name: State.fresh(list(dense.parameters())) for name in followed}
    for step in range(STEPS):
        lab.at(step, f"proof of {config.model}")
        ours.backward(step)
        before = [flat(each.model) for each in ours.trainees]
        ours.update(step)
        lab.at(step, f"one process, of {config.model}")
        if lab.rank == 0:
            for name, trainee, start in zip(followed, trainees, before, strict=True):
                put(dense, alone[name].weights)
                wanted = gradients(dense, stream, K, step)
                rate = rate_of(name, LEARNING_RATE, K, step, HORIZON)
                alone[name] = alone[name].stepped(name, wanted, rate, step + 1)
                hold(lab, f"{config.model} {name}", trainee.model, wanted, alone[name])
                if name not in ("lars", "lamb"):
                    hold_rate(lab, f"{config.model} {name}", trainee.model, start, rate, step)
        lab.stepped()
        lab.exchange.barrier("one process")


def prove_layers(lab: Lab, followed: Mapping[str, Recipe]) -> None:
    """The optimizers that scale layers, on layers that no model begins with."""
    for name in ("lars", "lamb"):
        if name in followed:
            lab.at(0, f"layers of {name}")
            hold_layers(lab, name, followed[name])


def hold(lab: Lab, name: str, mine: Model, wanted: list[Tensor], state: State) -> None:
    """A step on N ranks against the same in one process."""
    off = (flat(mine, gradients=True) - vector(wanted)).abs().nan_to_num(torch.inf).max().item()
    lab.check("gradients", off, TOLERANCE, variant=name, control=DEALT)
    off = (flat(mine) - vector(state.weights)).abs().nan_to_num(torch.inf).max().item()
    lab.check("weights", off, TOLERANCE, variant=name, control=CONTROL)


def hold_rate(lab: Lab, name: str, mine: Model, before: Tensor, right: float, step: int) -> None:
    """The length of plain SGD's step from the weights `before`, against the formula's."""
    gradient = flat(mine, gradients=True)
    measured = -((flat(mine) - before) @ gradient / (gradient @ gradient)).item()
    detail = f"of step {step}: {measured:.4g} measured, {right:.4g} by the formula; the difference is relative"
    lab.check("learning rate", abs(measured / right - 1), RATE_TOLERANCE, variant=name, detail=detail)


def flat(model: Model, *, gradients: bool = False) -> Tensor:
    """All weights, or gradients, as one vector; a parameter that no sample reached has a gradient of zeros."""
    zeros = torch.zeros_like
    return vector(
        [(p.grad if p.grad is not None else zeros(p)) if gradients else p.detach() for p in model.parameters()]
    )


def vector(tensors: list[Tensor]) -> Tensor:
    """All numbers of some tensors."""
    return torch.cat([tensor.flatten() for tensor in tensors])
