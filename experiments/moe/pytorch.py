"""PyTorch's own way for rows to travel: `all_to_all_single` with uneven splits, in the place of our messages.

It records nothing for autograd by itself, like all of torch.distributed: around it stands what stands around ours.
"""

from collections.abc import Sequence
from functools import partial

import torch.distributed as dist
from torch import Tensor

from distlab.collectives.phases import phase
from distlab.expert_parallel.dispatch import Compute
from distlab.pipeline_parallel.strategy import Sleep
from distlab.workload.experts import MixtureModel


class AllToAllSingle:
    """Rows of uneven numbers from each rank of `group` to each, in one call."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def __call__(self, rows: Tensor, give: list[int], take: list[int]) -> Tensor:
        came = rows.new_empty(sum(take), rows.shape[1])
        with phase("receive"):
            dist.all_to_all_single(came, rows.contiguous(), take, give, group=self.group)
        return came


# Pretended compute: experts that sleep for each row, so that two cores can show what four ranks pay for imbalance.
#
# Ranks that compute on shared cores take turns, and the busiest one costs no more than the sum of all. Those that
# sleep do not. LAB_ROW_US is the time of a row through a whole expert forward, twice that backward; a part of an
# expert's hidden units takes its share. The real experts are still there, and what they take comes on top.

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
