"""How long steps take on a slow link: the slowest rank's seconds, in rounds in which all candidates take turns."""

import statistics
from collections.abc import Callable, Mapping

import torch

from experiments.dp.summing import summing
from workers.lab import Lab
from workers.measure.formulas.slowest import slowest_of
from workers.parallel.buckets import AllReduce, GradientBuckets
from workers.strategies.replica import Replica
from workers.workload.data import Microbatch

MIB = 2**20
ROUNDS = 3  # the median drops the first one, which warms up; on a slow link a step is long, and like the next


def replica(lab: Lab, bucket_bytes: float, all_reduce: AllReduce | None = None) -> Replica:
    """A replica as `bucketed` has it, with buckets of that size, summed as there or by another all_reduce."""
    model = lab.model(getattr(torch, lab.config.dtype))
    summed = all_reduce or summing(lab.group, lab.config)
    return Replica(model, lab.config, GradientBuckets(model.parameters(), lab.group, bucket_bytes, all_reduce=summed))


def step(strategy: Replica, microbatches: list[Microbatch]) -> None:
    """One step of training."""
    strategy.backward(microbatches)
    strategy.update()


def send_nothing(bucket: torch.Tensor) -> None:
    """An all_reduce over a link without end, as far as time goes: every rank keeps its own gradients."""


def medians_s(lab: Lab, calls: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """Seconds of each call: of the slowest rank, and of the median round."""
    rounds = [[lab.seconds(call) for call in calls.values()] for _ in range(ROUNDS)]
    everyone = lab.exchange.everyone("rounds", rounds)  # [rank][round][call]
    slowest = [slowest_of(of_round) for of_round in zip(*everyone, strict=True)]
    return dict(zip(calls, map(statistics.median, zip(*slowest, strict=True)), strict=True))
