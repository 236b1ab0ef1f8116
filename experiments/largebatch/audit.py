"""The sweep itself, held: sampled steps of what trains in LAB_DTYPE, against one process from the state before.

The proof holds a few steps in float64; the sweep takes thousands in another type, on other code paths, and its losses
decide nothing. So of every k the first step, the last and one drawn by the seed are audited, two recipes each: rank 0
takes the gradient of the samples that are due, at the weights of before, and the formula's step (reference.py).

    trained gradients  the sum over ranks against one process of the same type: only roundings differ
    trained weights    the step from there by the formula in float64, over what may be rounded

What a step began from is what the step before left, not what the step says that it found: who forgets its momentum in
between is told.
"""

import random
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from experiments.largebatch.lockstep import Trainee
from experiments.largebatch.recipes import base_rate
from experiments.largebatch.reference import State, gradients, put, rate_of
from workers.lab import Lab
from workers.workload.model import Model, build_model

# In epsilons of LAB_DTYPE. Gradients: n roundings of half an epsilon add up to √n/2 if they are independent, 45 for the
# 512 samples of 16 numbers of the largest batch. Sweeps of three ranks reached 1.3 in float32, diverging ones among
# them; another batch's gradient is off by about its own size, 8e6 epsilons of float32 and 128 of bfloat16.
GRADIENTS = 64.0
# The formula rounds some ten times, each by half an epsilon of weight, moment or step; the same sweeps reached 3.1.
WEIGHTS = 8.0
CONTROLS = "tests/experiments/test_largebatch.py::{}"


@dataclass(frozen=True)
class Audited:
    """One training at one step: who it is, and the state that the step before left."""

    name: str
    trainee: Trainee
    before: State


def sampled(seed: int, k: int, steps: int, names: list[str]) -> dict[int, list[str]]:
    """Which recipes are audited at which step: the first, the last and a drawn one, two recipes at each."""
    draw = random.Random(f"{seed} {k}")
    due = list(dict.fromkeys((0, steps - 1, draw.randrange(steps))))
    order = draw.sample(names, len(names))
    return {
        step: list(dict.fromkeys(order[(2 * place + each) % len(order)] for each in range(2)))
        for place, step in enumerate(due)
    }


class Audit:
    """Of the trainings of one k, by (recipe, seed); on rank 0 alone."""

    def __init__(self, lab: Lab, model: str, runs: Mapping[tuple[str, int], Trainee], steps: int) -> None:
        self.lab, self.model, self.steps = lab, model, steps
        first = next(seed for _, seed in runs)
        self.trainees = {name: trainee for (name, seed), trainee in runs.items() if seed == first}
        self.seed, self.k = first, next(iter(runs.values())).k
        self.due = sampled(first, self.k, steps, list(self.trainees)) if lab.rank == 0 and lab.config.proof else {}
        self.audited: list[Audited] = []
        self.seconds = 0.0  # that it took, which are none of the sweep's
        self.remember(0)

    def remember(self, step: int) -> None:
        """Before `step`, and right after the one before it: what it has to begin from."""
        self.audited = [Audited(n, self.trainees[n], self.state(n, step)) for n in self.due.get(step, [])]

    def state(self, name: str, step: int) -> State:
        """As it stands; before the first step as the seed drew it, with no moments."""
        trainee = self.trainees[name]
        if step == 0:
            return State.fresh(list(self.fresh(trainee).parameters()))
        return state_of(trainee)

    def fresh(self, trainee: Trainee) -> Model:
        """A model of the training's sizes, type and first weights."""
        of = trainee.stream
        return build_model(of.config, self.seed).to(of.device, of.dtype)

    def hold(self, step: int, ranks: int) -> None:
        """After `step`: what it should have come to."""
        started = time.perf_counter()
        for each in self.audited:
            name, stream = f"{self.model} {each.name}", each.trainee.stream
            alone, eps = self.fresh(each.trainee), torch.finfo(stream.dtype).eps
            put(alone, each.before.weights)
            wanted = gradients(alone, stream, self.k, step, parts=ranks)
            summed = [p.grad if p.grad is not None else torch.zeros_like(p) for p in each.trainee.model.parameters()]
            if not all(bool(tensor.isfinite().all()) for tensor in wanted):
                for claim in ("trained gradients", "trained weights"):
                    self.lab.waive(claim, "a recipe that diverged: one process has no number there either", name)
                continue
            detail, unit = f"step {step} of k = {self.k}", f"epsilons of {stream.config.dtype}"
            self.lab.check(
                "trained gradients",
                apart(summed, wanted) / eps,
                GRADIENTS,
                name,
                detail,
                unit=unit,
                control=CONTROLS.format("test_a_sweep_on_one_batch_fails_the_run"),
            )
            rate = rate_of(each.name, base_rate(stream.config), self.k, step, self.steps)
            exact = each.before.to(torch.float64)
            after = exact.stepped(each.name, [tensor.double() for tensor in summed], rate, step + 1)
            off = roundings(exact, state_of(each.trainee).to(torch.float64), after, eps)
            self.lab.check(
                "trained weights",
                off,
                WEIGHTS,
                name,
                detail,
                unit=unit,
                control=CONTROLS.format("test_a_sweep_that_forgets_fails_the_run"),
            )
        self.remember(step + 1)
        self.seconds += time.perf_counter() - started


def state_of(trainee: Trainee) -> State:
    """A copy of weights and moments; moments that nobody made are zero."""
    weights = list(trainee.model.parameters())
    state = getattr(trainee.optimizer, "state", {})
    found = State.fresh(weights)
    for key, moments in (("momentum", found.first), ("m", found.first), ("v", found.second)):
        for place, weight in enumerate(weights):
            if key in state.get(weight, {}):
                moments[place] = state[weight][key].detach().clone()
    return found


def apart(found: list[Tensor], wanted: list[Tensor]) -> float:
    """The norm of the difference over the norm, of all tensors together."""
    mine, other = (torch.cat([tensor.double().flatten() for tensor in each]) for each in (found, wanted))
    return float((mine - other).norm() / other.norm().clamp(min=torch.finfo(torch.float64).tiny))


def roundings(before: State, found: State, wanted: State, eps: float) -> float:
    """How far weights and moments are from the formula's, in epsilons of what is added: the largest of all tensors.

    A tensor's error is measured by its norm, over the norms of what it was, of what it became and of the step between.
    """
    worst = 0.0
    for start, mine, right in zip(tensors(before), tensors(found), tensors(wanted), strict=True):
        size = max(start.norm().item(), right.norm().item(), torch.finfo(torch.float64).tiny)
        worst = max(worst, float((mine - right).norm().nan_to_num(torch.inf)) / (eps * size))
    return worst


def tensors(state: State) -> Iterator[Tensor]:
    """All of them."""
    for each in fields(state):
        yield from getattr(state, each.name)
