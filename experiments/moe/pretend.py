"""Pretended compute: experts that sleep for each row, so that two cores can show what four ranks pay for imbalance.

Ranks that compute on shared cores take turns, and the busiest one costs no more than the sum of all. Those that sleep
do not. LAB_ROW_US is the time of a row through a whole expert forward, twice that backward; a part of an expert's
hidden units takes its share. The real experts are still there, and what they take comes on top.
"""

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from workers.parallel.dispatch import Compute
from workers.workload.experts import MixtureModel

PASSES = 3  # a forward, and a backward that takes two


class Sleep(torch.autograd.Function):
    """Identity; sleeps so many seconds in forward, twice as many in backward."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return rows.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        time.sleep((PASSES - 1) * ctx.seconds)
        return gradients[0], None


def pretend_compute(model: MixtureModel, row_s: float) -> None:
    """Let the experts of each mixture sleep `row_s` behind each row."""
    for mixture in model.mixtures.values():
        mixture.compute = partial(slept, mixture.compute, row_s)


def slept(compute: Compute, row_s: float, rows: Tensor, counts: list[int]) -> Tensor:
    """What `compute` makes of the rows, later."""
    done: Tensor = Sleep.apply(compute(rows, counts), row_s * len(rows))  # type: ignore[no-untyped-call]
    return done


def pretended_s(rows: Sequence[Sequence[int]], row_s: float) -> float:
    """Seconds of a step in which every layer takes as long as its busiest rank; `rows` are each rank's of each
    layer."""
    return PASSES * row_s * sum(map(max, rows))
