"""Pretended compute: experts that sleep for each row, so that two cores can show what four ranks pay for imbalance.

Ranks that compute on shared cores take turns, and the busiest one costs no more than the sum of all. Those that sleep
do not. LAB_ROW_US is the time of a row through a whole expert forward, twice that backward; a part of an expert's
hidden units takes its share. The real experts are still there, and what they take comes on top.
"""

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from workers.parallel.dispatch import Compute
from workers.strategies.pretended import Sleep
from workers.workload.experts import MixtureModel

PASSES = 3  # a forward, and a backward that takes two


def pretend_compute(model: MixtureModel, row_s: float) -> None:
    """Let the experts of each mixture sleep `row_s` behind each row."""
    for mixture in model.mixtures.values():
        mixture.compute = partial(slept, mixture.compute, row_s)


def slept(compute: Compute, row_s: float, rows: Tensor, counts: list[int]) -> Tensor:
    """What `compute` makes of the rows, later."""
    forward_s = row_s * len(rows)
    done: Tensor = Sleep.apply(compute(rows, counts), forward_s, (PASSES - 1) * forward_s)  # type: ignore[no-untyped-call]
    return done


def pretended_s(rows: Sequence[Sequence[int]], row_s: float) -> float:
    """Seconds of a step in which every layer takes as long as its busiest rank; `rows` are each rank's of each
    layer."""
    return PASSES * row_s * sum(map(max, rows))
