"""The recipes: what becomes of the learning rate when the batch grows to k times, and with which optimizer.

Base rates are those of k = 1, found by trying on the tiny models of this mode; other models want others, which LAB_LR sets for SGD.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from workers.config import Config
from workers.lab import Bug
from workers.parallel import rates
from workers.parallel.lamb import Lamb
from workers.parallel.lars import Lars
from workers.parallel.layerwise import Group, decayed_apart
from workers.workload.model import Model
from workers.workload.optimizer import PlainSGD

SGD_RATE, LARS_RATE, LAMB_RATE = 0.05, 0.2, 0.02
LARS_TRUST = 0.02  # the paper's 0.001 is for 90 epochs of ResNet-50; here some 200 steps have to do
LARS_DECAY, LAMB_DECAY = 1e-4, 1e-2

BUGS = {
    "lr_unscaled": Bug(
        "the batch grows k times and the learning rate stays, although the recipe says k times: as many samples move the weights "
        "k times less, and the run looks healthy while it learns too little (the first classic bug of multi-GPU training)",
        "learning rate",
    )
}


class Stepper(Protocol):
    """An optimizer: groups with a rate each, and a step."""

    param_groups: list[Group]

    def step(self) -> None: ...


@dataclass(frozen=True)
class Recipe:
    """`target(k)` times the base rate for k times the batch, at once or after warm-up, with a fresh optimizer of `optimizer`."""

    target: Callable[[float], float]
    optimizer: Callable[[Model, Config], Stepper]
    warms_up: bool = False

    def factor(self, k: int, step: int, steps: int) -> float:
        """What the base rate is multiplied with at `step` of `steps`."""
        target = self.target(k)
        return rates.warmup(target, step, warmup_steps(steps)) if self.warms_up else target

    def mistaken(self) -> "Recipe":
        """LAB_BUG=lr_unscaled: the rate is left as it was where it should be k times as high."""
        scaled = self.target is rates.linear
        return Recipe(rates.unscaled, self.optimizer, self.warms_up) if scaled else self


def warmup_steps(steps: int) -> int:
    """The first quarter; Goyal et al. took 5 of 90 epochs, which would be no whole step here."""
    return steps // 4


def base_rate(config: Config) -> float:
    """LAB_LR, or this mode's own for SGD."""
    return config.lr or SGD_RATE


def sgd(model: Model, config: Config) -> Stepper:
    """Plain, so that an update is the gradient times the rate, and nothing else."""
    return PlainSGD(model.parameters(), base_rate(config))


def layerwise_sgd(model: Model, config: Config) -> Stepper:  # noqa: ARG001  it has a base rate of its own
    """LARS, biases and gains apart."""
    return Lars(decayed_apart(model.parameters(), LARS_DECAY), LARS_RATE, trust=LARS_TRUST)


def layerwise_adam(model: Model, config: Config) -> Stepper:  # noqa: ARG001
    """LAMB, biases and gains apart."""
    return Lamb(decayed_apart(model.parameters(), LAMB_DECAY), LAMB_RATE)


RECIPES = {
    "unscaled": Recipe(rates.unscaled, sgd),
    "sqrt": Recipe(rates.sqrt, sgd),
    "linear": Recipe(rates.linear, sgd),
    "warmup": Recipe(rates.linear, sgd, warms_up=True),
    "lars": Recipe(rates.linear, layerwise_sgd, warms_up=True),
    "lamb": Recipe(rates.sqrt, layerwise_adam, warms_up=True),
}
