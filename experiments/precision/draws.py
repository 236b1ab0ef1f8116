"""Rounding at random, held to what it claims: up with the probability of the way that is left, each time anew.

All weights of a variant are set to 1 and are given a gradient whose update is a known share f of the way to bf16's next
number, through the variant's own update. Of n weights n·f have to arrive there, give or take the deviation of n draws,
√(nf(1 - f)), and two rounds have to agree on f² + (1 - f)² of them: who rounds always down, always to the nearest or
draws the same again is off by more than SIGMAS of these. Numbers come from the seed, so a run that holds holds again;
among all seeds, one in 10^9 would fail for each share.
"""

import itertools
import math

import torch
from torch import Tensor

from experiments.precision.proof import LEARNING_RATE
from experiments.precision.seen import flat
from workers.contract import Build
from workers.lab import Lab
from workers.passes.masks import sampling_errors
from workers.strategies.replica import Replica

SHARES = (0.125, 0.5, 0.75)
SIGMAS = 6.0
DRAWS = 2000  # at least, of each share: rounding down is off by √(nf/(1 - f)) deviations, 17 for the smallest share
STEP = 2.0**-7  # from 1 to bf16's next number
CONTROL = "tests/experiments/test_precision.py::test_rounding_that_is_biased_fails_the_run"


def check_draws(lab: Lab, name: str, build: Build) -> None:
    """The largest deviation of any share, in sigmas; on every rank, and nothing is sent."""
    config = lab.config.model_copy(update={"optimizer": "sgd", "lr": LEARNING_RATE, "clip": None})
    strategy = build(lab.model(torch.float32), lab.mesh, config)
    assert isinstance(strategy, Replica)
    worst = 0.0
    for share in SHARES:
        rounds = max(2, -(-DRAWS // strategy.model.num_parameters()))
        ups = [ups_of(strategy, share) for _ in range(rounds)]
        agreed = torch.cat([one == other for one, other in itertools.pairwise(ups)])
        worst = max(worst, deviation(torch.cat(ups), share), deviation(agreed, share**2 + (1 - share) ** 2))
    detail = "the worst of three shares of a unit, of as many draws"
    lab.check("rounded at random", worst, SIGMAS, name, detail, unit="deviations", control=CONTROL)


@torch.no_grad()
def ups_of(strategy: Replica, share: float) -> Tensor:
    """Which weights went up, of all that were a share of the way; NaN where one went anywhere else."""
    for parameter in strategy.model.parameters():
        parameter.fill_(1.0)
        parameter.grad = torch.full_like(parameter, -share * STEP / LEARNING_RATE)
    strategy.update()
    return (flat(strategy.model.parameters()) - 1.0) / STEP


def deviation(happened: Tensor, probability: float) -> float:
    """How far from its expectation, in standard deviations; infinite where there is something else than 0 and 1."""
    outcomes = happened.double()
    if not bool(((outcomes == 0) | (outcomes == 1)).all()):
        return math.inf
    return sampling_errors(outcomes.sum().item(), len(outcomes), probability)
