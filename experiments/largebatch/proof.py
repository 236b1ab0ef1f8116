"""The proof: k times the batch on N ranks is what one process computes, and the rate is what the recipe says.

A few steps of every recipe in float64, through warm-up and past it, with shards that are not equally large. Rank 0 takes the same steps
alone, on whole batches, by recipes without a bug. The base rate of SGD is that of every proof, whatever LAB_LR is; the rate of a step is
measured, as the length of an update along the gradient, -<Δw, g> / <g, g>. A loss would not show it.
"""

import copy

import torch
from torch import Tensor

from experiments.largebatch.claims import recipes
from experiments.largebatch.lockstep import Lockstep, Trainee
from experiments.largebatch.recipes import Recipe, sgd
from experiments.largebatch.samples import Stream
from workers.config import Config
from workers.lab import Lab
from workers.parallel import rates
from workers.parallel.rates import set_rates
from workers.passes.proof import LEARNING_RATE, TOLERANCE
from workers.workload.model import Model, build_model

K, STEPS, HORIZON = 4, 3, 8  # of 8 steps a quarter warms up: the base rate, on the way, the whole rate
SMALL = 1e-5  # small enough for η²: at 1e-3 a gpt of width 128 and depth 8 is 3.73 times nearer at half the rate, not 4


def prove(lab: Lab, config: Config) -> None:
    """Gradients, weights and rates of every recipe, then Goyal's equality of SGD's steps."""
    config = config.model_copy(update={"lr": LEARNING_RATE})
    stream = Stream(config, config.seed, K * STEPS, lab.device, torch.float64)
    dense = build_model(config, config.seed).to(lab.device, torch.float64)
    chosen = recipes(config)
    ours = Lockstep([trainee(dense, stream, each, config) for each in chosen.values()], lab.group, uneven=True)
    without = config.model_copy(update={"bug": None})
    alone = [trainee(dense, stream, each, without) for each in chosen.values()]
    for step in range(STEPS):
        lab.at(step, f"proof of {config.model}")
        ours.backward(step)
        before = [flat(each.model) for each in ours.trainees]
        ours.update(step)
        if lab.rank == 0:
            for name, mine, reference, weights in zip(chosen, ours.trainees, alone, before, strict=True):
                hold(lab, f"{config.model} {name}", mine, reference, weights, chosen[name], step)
        lab.stepped()
        lab.exchange.barrier("one process")
    if lab.rank == 0:
        shrinks(lab, config, dense, stream)


def trainee(dense: Model, stream: Stream, recipe: Recipe, config: Config) -> Trainee:
    """A training that begins at the weights of `dense`."""
    return Trainee(copy.deepcopy(dense), stream, recipe, K, HORIZON, config)


def hold(lab: Lab, name: str, mine: Trainee, reference: Trainee, before: Tensor, recipe: Recipe, step: int) -> None:
    """One step of a trainee on N ranks against the same in one process."""
    reference.model.zero_grad()
    reference.backward(reference.stream.dealt(K, step, 0, 1))
    reference.update(step)
    found, wanted = flat(mine.model, gradients=True), flat(reference.model, gradients=True)
    lab.check("gradients", (found - wanted).abs().max().item(), TOLERANCE, variant=name)
    lab.check("weights", (flat(mine.model) - flat(reference.model)).abs().max().item(), TOLERANCE, variant=name)
    if recipe.optimizer is sgd:
        measured = -((flat(mine.model) - before) @ found / (found @ found)).item()
        right = LEARNING_RATE * recipe.factor(K, step, HORIZON)
        detail = f"of step {step}: {measured:.4g} measured, {right:.4g} by the recipe; the difference is relative"
        lab.check("learning rate", abs(measured / right - 1), 1e-9, variant=name, detail=detail)


def shrinks(lab: Lab, config: Config, dense: Model, stream: Stream) -> None:
    """k steps of η and one of kη end as far apart as η²: half the rate, a quarter of the distance."""
    whole, half = (apart(dense, stream, config, rate) for rate in (SMALL, SMALL / 2))
    lab.compare(
        "k steps of η against one of kη", 4, whole / half, "x", 0.1, variant=config.model,
        formula="distance at η over that at η/2",
    )  # fmt: skip


def apart(dense: Model, stream: Stream, config: Config, rate: float) -> float:
    """How far k steps of `rate` end from one step of k times it, over the same samples."""
    ends = []
    for times, k in ((K, 1), (1, K)):
        model = copy.deepcopy(dense)
        optimizer = sgd(model, config.model_copy(update={"lr": rate}))
        set_rates(optimizer.param_groups, rates.linear(k))
        for step in range(times):
            model.zero_grad()
            for inputs, targets, share in stream.dealt(k, step, 0, 1):
                (model(inputs, targets) * share).backward()
            optimizer.step()
        ends.append(flat(model))
    distance: float = torch.linalg.vector_norm(ends[0] - ends[1]).item()
    return distance


def flat(model: Model, *, gradients: bool = False) -> Tensor:
    """All weights, or gradients, as one vector; a parameter that no sample reached has a gradient of zeros."""
    zeros = torch.zeros_like
    tensors = [(p.grad if p.grad is not None else zeros(p)) if gradients else p.detach() for p in model.parameters()]
    return torch.cat([tensor.flatten() for tensor in tensors])
