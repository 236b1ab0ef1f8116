"""The recipes: what becomes of the learning rate when the batch grows to k times, and with which optimizer.

Base rates are those of k = 1, found by trying on the tiny models of this mode; other models want others, which LAB_LR
sets for SGD.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch.distributed as dist

from workers.config import Config
from workers.parallel import rates
from workers.parallel.lamb import Lamb
from workers.parallel.lars import Lars
from workers.parallel.layerwise import Group, decayed_apart
from workers.workload.model import Model
from workers.workload.optimizer import PlainSGD

SGD_RATE, LARS_RATE, LAMB_RATE = 0.05, 0.2, 0.02
LARS_TRUST = 0.02  # the paper's 0.001 is for 90 epochs of ResNet-50; here some 200 steps have to do
LARS_DECAY, LAMB_DECAY = 1e-4, 1e-2


class Stepper(Protocol):
    """An optimizer: groups with a rate each, and a step."""

    param_groups: list[Group]

    def step(self) -> None: ...


@dataclass(frozen=True)
class Recipe:
    """`target(k)` times the base rate for k times the batch, at once or after warm-up, with a fresh `optimizer`."""

    target: Callable[[float], float]
    optimizer: Callable[..., Stepper]  # (model, config), and for LARS and LAMB `sharded_over`, see `Layerwise`
    warms_up: bool = False

    def factor(self, k: int, step: int, steps: int) -> float:
        """What the base rate is multiplied with at `step` of `steps`."""
        target = self.target(k)
        return rates.warmup(target, step, warmup_steps(steps)) if self.warms_up else target


def warmup_steps(steps: int) -> int:
    """The first quarter; Goyal et al. took 5 of 90 epochs, which would be no whole step here."""
    return steps // 4


def base_rate(config: Config) -> float:
    """LAB_LR, or this mode's own for SGD."""
    return config.lr or SGD_RATE


def sgd(model: Model, config: Config) -> Stepper:
    """Plain, so that an update is the gradient times the rate, and nothing else."""
    return PlainSGD(model.parameters(), base_rate(config))


def layerwise_sgd(
    model: Model,
    config: Config,  # noqa: ARG001  it has a base rate of its own
    sharded_over: dist.ProcessGroup | None = None,
) -> Stepper:
    """LARS, biases and gains apart."""
    groups = decayed_apart(model.parameters(), LARS_DECAY)
    return Lars(groups, LARS_RATE, trust=LARS_TRUST, sharded_over=sharded_over)


def layerwise_adam(
    model: Model,
    config: Config,  # noqa: ARG001
    sharded_over: dist.ProcessGroup | None = None,
) -> Stepper:
    """LAMB, biases and gains apart."""
    return Lamb(decayed_apart(model.parameters(), LAMB_DECAY), LAMB_RATE, sharded_over=sharded_over)


def standing_for(recipes: Mapping[str, Recipe], k: int) -> dict[str, str]:
    """Which recipe is run for which: at k = 1 all rates are the base rate, and those of one optimizer are one run."""
    first = {recipe.optimizer: name for name, recipe in reversed(list(recipes.items()))}
    return {name: first[recipe.optimizer] if k == 1 else name for name, recipe in recipes.items()}


def distinct(recipes: Mapping[str, Recipe], k: int) -> dict[str, Recipe]:
    """The recipes that are run at k."""
    return {name: recipes[name] for name in dict.fromkeys(standing_for(recipes, k).values())}
