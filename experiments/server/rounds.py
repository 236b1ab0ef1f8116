"""The proof of `local_sgd` and `diloco`, whose workers train apart for H steps, a round.

What they compute is on purpose not what one process computes, but for H = 1. So they are proven twice: at H = 1
against one process with the whole batch, and at the H given, on one layer, against all workers in one process, written
down from the formula with nothing sent and nothing shared with the workers (reference.py). The first rounds of the
timed pass are held against the same process in LAB_DTYPE.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from experiments.server.reference import OneProcess
from workers.config import Config
from workers.contract import Build
from workers.lab import Lab
from workers.measure.difference import larger
from workers.passes.replicas import check_replicas
from workers.workload.model import Model, build_model

TOLERANCE = 1e-12
# Learning rate and momentum of the outer step: the mean (Stich 2019, algorithm 1), and Nesterov's with the paper's own
# (Douillard et al. 2023, section 3.1). Written down once more, since what is proven takes the variants' own numbers.
PUBLISHED = {"local_sgd": (1.0, 0.0), "diloco": (0.7, 0.9)}
CONTROL = "tests/experiments/test_server.py::test_a_wrong_mean_fails_losses_and_weights_at_every_h"
PUBLISHED_CONTROL = "tests/experiments/test_server.py::test_an_outer_step_by_other_numbers_fails_the_run"
LEARNING_RATE = 0.01
MOST_PROVEN = 12  # local steps of the proof: two rounds of them are run, whatever H is


class Rounds(NamedTuple):
    """Steps of a round, and learning rate and momentum of the outer step at its end."""

    local_steps: int
    lr: float
    momentum: float


def prove_rounds(lab: Lab, rounds: Rounds, name: str, build: Build) -> None:
    """Check the variant that `build` makes at H = 1 and at the H given."""
    plain = lab.config.model_copy(update={"optimizer": "sgd", "clip": None, "lr": LEARNING_RATE})
    check_outer(lab, name, build, plain)
    check_against(lab, name, build, plain, rounds._replace(local_steps=1), workers=1)
    proven = rounds._replace(local_steps=min(rounds.local_steps, MOST_PROVEN))
    if proven.local_steps > 1:
        check_against(lab, name, build, shallow(plain), proven, workers=lab.world_size)
    if lab.config.optimizer == "adamw" or lab.config.clip is not None:
        tuned = shallow(lab.config)
        check_against(lab, name, build, tuned, proven, workers=lab.world_size, when=" as trained")


def check_outer(lab: Lab, name: str, build: Build, config: Config) -> None:
    """Two outer steps after rounds in which every worker moved by one: lr·(1 + m) and lr·(1 + m + m²) far."""
    config = shallow(config.with_own(local_steps=1))
    strategy = build(model_of(lab, config), lab.mesh, config)
    weights, (lr, momentum) = strategy.vectors.weights, PUBLISHED[name]  # type: ignore[attr-defined]
    off = 0.0
    for right in (lr * (1 + momentum), lr * (1 + momentum + momentum**2)):
        before = weights.clone()
        weights.sub_(1.0)
        strategy.outer.step(1 / lab.world_size)  # type: ignore[attr-defined]
        off = larger(off, (before - weights - right).abs().max().item())
    detail = f"of two steps of learning rate {lr:g} and momentum {momentum:g}, as published"
    lab.check("outer step", off, TOLERANCE, variant=name, detail=detail, control=PUBLISHED_CONTROL)


def shallow(config: Config) -> Config:
    """The same with one layer, for proofs in which one process does the work of all workers, and of many steps."""
    return config.model_copy(update={"depth": 1})


def model_of(lab: Lab, config: Config) -> Model:
    """The model of `config`, as a proof trains it."""
    return build_model(config, config.seed).to(lab.device, torch.float64)


def check_against(
    lab: Lab, name: str, build: Build, config: Config, rounds: Rounds, *, workers: int, when: str = ""
) -> None:  # fmt: skip
    """Losses and weights of two rounds against `workers` workers in one process; last, all ranks are equal."""
    config = config.with_own(local_steps=rounds.local_steps)
    when, steps = f" at H = {rounds.local_steps}{when}", 2 * rounds.local_steps
    batches = lab.batches(torch.float64, proof=True)
    wanted: tuple[list[float], Tensor] = ([], torch.zeros(0))
    lab.at(0, f"one process, beside {name}{when}")
    if lab.rank == 0:
        dealt = config.model_copy(update={"world_size": workers})
        one = OneProcess(model_of(lab, config), dealt, proof=True, device=lab.device, dtype=torch.float64)
        wanted = in_one_process(one, rounds, steps)
    strategy = build(model_of(lab, config), lab.mesh, config)
    losses = []
    for step in range(steps):
        lab.at(step, f"proof of {name}{when}")
        share = strategy.backward(lab.dealt(batches, step))
        assert share is not None
        losses.append(share.item())
        strategy.update()
        lab.stepped()
    everyone = lab.exchange.gather(f"losses of {name}", losses)
    weights = torch.cat([weight.flatten() for _, weight in strategy.full("weights")])
    if everyone is not None:
        summed = [sum(of_step) for of_step in zip(*everyone, strict=True)]
        worst = max(abs(one - other) for one, other in zip(summed, wanted[0], strict=True))
        lab.check(f"losses{when}", worst, TOLERANCE, variant=name, control=CONTROL)
        difference = (weights - wanted[1]).abs().max().item()
        lab.check(f"weights{when}", difference, TOLERANCE, variant=name, control=CONTROL)
    check_replicas(lab, name, strategy)


def in_one_process(one: OneProcess, rounds: Rounds, steps: int) -> tuple[list[float], Tensor]:
    """All workers of `one`, one after the other: the batch's loss at each step, and the common weights [P] at the end.

    A round as local SGD has it (Stich 2019, algorithm 1) and DiLoCo (Douillard et al. 2023, algorithm 1): every worker
    goes on from the common weights; what they moved in the mean over samples is the outer gradient. A last round that
    is not complete moves only its workers.
    """
    config, parameters, (local_steps, lr, momentum) = one.config, list(one.model.parameters()), rounds
    optimizers = [local_optimizer(parameters, config) for _ in range(config.world_size)]
    common = parameters_to_vector(parameters).detach()
    velocity, losses = torch.zeros_like(common), [0.0] * steps
    for begin in range(0, steps, local_steps):
        moved, samples = torch.zeros_like(common), 0
        for rank, optimizer in enumerate(optimizers):
            vector_to_parameters(common.clone(), parameters)
            seen = 0
            for step in range(begin, min(begin + local_steps, steps)):
                inputs, targets = one.samples(step, rank)
                losses[step] += local_step(one, optimizer, inputs, targets)
                seen += len(inputs)
            moved += seen * (common - parameters_to_vector(parameters).detach())
            samples += seen
        if begin + local_steps > steps:
            break
        moved /= samples
        velocity = momentum * velocity + moved
        common = common - lr * (moved + momentum * velocity)
    return losses, common


def hold_timed(lab: Lab, rounds: dict[str, Rounds]) -> None:
    """The losses of the timed pass up to the step that sees the second outer step (the first, where it has no
    momentum), against all workers in one process."""
    lab.at(0, "one process, in rounds")
    config, dtype, found = lab.config, getattr(torch, lab.config.dtype), lab.losses()
    for name in (name for name in rounds if name in found and config.proof):
        steps = min(config.steps, rounds[name].local_steps * (2 if rounds[name].momentum else 1) + 1)
        one = OneProcess(lab.model(dtype), config, proof=False, device=lab.device, dtype=dtype)
        wanted, _ = in_one_process(one, rounds[name], steps)
        worst = 0.0
        for own, other in zip(wanted, found[name], strict=False):
            worst = larger(worst, abs(own - other))
        tolerance = max(wanted) * loss_rounding(dtype, config, steps, config.batch * one.terms)
        detail = f"steps 0 to {steps - 1} of {config.steps}, against {lab.world_size} workers in one process"
        lab.check("timed losses", worst, tolerance, variant=name, detail=detail, control=CONTROL)
    lab.exchange.barrier("rounds in one process")


def loss_rounding(dtype: torch.dtype, config: Config, steps: int, terms: int) -> float:
    """What rounding may put between two losses of the same mean, as a share of them.

    The sum of the terms, in float32 or finer and in another order: half an eps for each level of a tree, twice. And
    the passes in `dtype`, of about 20 results in each layer whose roundings have nothing to do with each other, nor
    those of one step with another's or of one term with another's: their root, over that of the terms.
    """
    summing = torch.finfo(torch.promote_types(dtype, torch.float32)).eps * (1 + math.log2(terms))
    passes = torch.finfo(dtype).eps / 2 * math.sqrt(20 * (config.depth + 2) * steps / terms)
    return summing + passes


def local_step(one: OneProcess, optimizer: torch.optim.Optimizer | None, inputs: Tensor, targets: Tensor) -> float:
    """A worker's own step on the mean over its samples, plain SGD without an `optimizer`; returns its share of the
    batch's loss."""
    parameters, config = list(one.model.parameters()), one.config
    for parameter in parameters:
        parameter.grad = None
    total = one.model(inputs, targets)
    (total / targets.numel()).backward()
    if config.clip is not None:
        torch.nn.utils.clip_grad_norm_(parameters, config.clip)
    if optimizer is not None:
        optimizer.step()
    else:
        for parameter in parameters:
            assert parameter.grad is not None
            parameter.data -= config.learning_rate * parameter.grad
    share: float = total.item() / (config.batch * one.terms)
    return share


def local_optimizer(parameters: list[torch.nn.Parameter], config: Config) -> torch.optim.Optimizer | None:
    """AdamW, with a state for each worker; None is plain SGD."""
    return torch.optim.AdamW(parameters, lr=config.learning_rate) if config.optimizer == "adamw" else None
