"""Learning rates for a batch of k times the base: pure functions of k and the step, as factors of the base rate.

    unscaled    1           as many samples in k times fewer steps of the same length: slow
    sqrt        √k          keeps the variance of an update: k times the samples have 1/k of the noise (Krizhevsky 2014,
                section 5)
    linear      k           k steps of η along nearly equal gradients are one step of kη (Goyal et al. 2017, section
                2.1)
    warmup      1 to k      linear, but it gets there in equal steps, since early gradients are not nearly equal
                (section 2.2)

A factor leaves every parameter group its own base rate: one rate for all groups would undo what they are there for.
"""

import math
from collections.abc import Iterable
from typing import Any


def unscaled(k: float, step: int = 0) -> float:  # noqa: ARG001  the same at every step, whatever k
    """The base rate."""
    return 1.0


def sqrt(k: float, step: int = 0) -> float:  # noqa: ARG001
    """√k times the base rate."""
    return math.sqrt(k)


def linear(k: float, step: int = 0) -> float:  # noqa: ARG001
    """k times the base rate."""
    return float(k)


def warmup(target: float, step: int, warmup_steps: int) -> float:
    """From the base rate at step 0 to `target` times it at `warmup_steps`, and no further ever after; steps count from
    0."""
    if step >= warmup_steps:
        return float(target)
    return 1.0 + (target - 1.0) * step / warmup_steps


def set_rates(groups: Iterable[dict[str, Any]], factor: float) -> None:
    """Give every parameter group `factor` times its own base rate, which is the one it was made with."""
    for group in groups:
        group.setdefault("base_lr", group["lr"])
        group["lr"] = factor * group["base_lr"]
