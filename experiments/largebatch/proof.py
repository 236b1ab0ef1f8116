"""The proof: k times the batch on N ranks is what one process computes, and the rate is what the recipe says.

A few steps of every recipe in float64, through warm-up and past it, with shards that are not equally large. Rank 0
takes the same steps by the naive loop, on whole batches, as the recipe says. The base rate of SGD is that of every
proof, whatever LAB_LR is; the rate of a step is measured, as the length of an update along the gradient,
-<Δw, g> / <g, g>. A loss would not show it.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import TypeAlias

import torch
from torch import Tensor

from experiments.largebatch.lockstep import Lockstep, Trainee
from experiments.largebatch.recipes import Recipe, sgd
from experiments.largebatch.samples import Stream
from workers.config import Config
from workers.lab import Lab
from workers.passes.proof import LEARNING_RATE, TOLERANCE
from workers.workload.model import Model, build_model

K, STEPS, HORIZON = 4, 3, 8  # of 8 steps a quarter warms up: the base rate, on the way, the whole rate

# One process that trains the model by a recipe on batches of k times the base, for some steps.
Naive: TypeAlias = Callable[[Model, Stream, Recipe, int, int, Config], Iterator[None]]


def prove(
    lab: Lab, config: Config, recipes: Mapping[str, Recipe], followed: Mapping[str, Recipe], naive: Naive
) -> None:
    """Gradients, weights and rates of all `recipes`, where ours do what is `followed` and one process what they say."""
    config = config.model_copy(update={"lr": LEARNING_RATE})
    stream = Stream(config, config.seed, K * STEPS, lab.device, torch.float64)
    dense = build_model(config, config.seed).to(lab.device, torch.float64)
    ours = Lockstep(
        [Trainee(copy.deepcopy(dense), stream, each, K, HORIZON, config) for each in followed.values()],
        lab.group,
        uneven=True,
    )
    alone = [copy.deepcopy(dense) for _ in recipes]
    pairs = zip(alone, recipes.values(), strict=True)
    trainings = [naive(model, stream, recipe, K, HORIZON, config) for model, recipe in pairs]
    for step in range(STEPS):
        lab.at(step, f"proof of {config.model}")
        ours.backward(step)
        before = [flat(each.model) for each in ours.trainees]
        ours.update(step)
        if lab.rank == 0:
            for training in trainings:
                next(training)
            models = [each.model for each in ours.trainees]
            for (name, recipe), mine, wanted, start in zip(recipes.items(), models, alone, before, strict=True):
                hold(lab, f"{config.model} {name}", mine, wanted)
                if recipe.optimizer is sgd:
                    hold_rate(lab, f"{config.model} {name}", mine, start, recipe, step)
        lab.stepped()
        lab.exchange.barrier("one process")


def hold(lab: Lab, name: str, mine: Model, wanted: Model) -> None:
    """A step on N ranks against the same in one process."""
    gradients = (flat(mine, gradients=True) - flat(wanted, gradients=True)).abs().max().item()
    lab.check("gradients", gradients, TOLERANCE, variant=name)
    lab.check("weights", (flat(mine) - flat(wanted)).abs().max().item(), TOLERANCE, variant=name)


def hold_rate(lab: Lab, name: str, mine: Model, before: Tensor, recipe: Recipe, step: int) -> None:
    """The length of plain SGD's step from the weights `before`, against the recipe."""
    gradient = flat(mine, gradients=True)
    measured = -((flat(mine) - before) @ gradient / (gradient @ gradient)).item()
    right = LEARNING_RATE * recipe.factor(K, step, HORIZON)
    detail = f"of step {step}: {measured:.4g} measured, {right:.4g} by the recipe; the difference is relative"
    lab.check("learning rate", abs(measured / right - 1), 1e-9, variant=name, detail=detail)


def flat(model: Model, *, gradients: bool = False) -> Tensor:
    """All weights, or gradients, as one vector; a parameter that no sample reached has a gradient of zeros."""
    zeros = torch.zeros_like
    tensors = [(p.grad if p.grad is not None else zeros(p)) if gradients else p.detach() for p in model.parameters()]
    return torch.cat([tensor.flatten() for tensor in tensors])
