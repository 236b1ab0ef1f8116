"""What a bucket gets, gives and keeps, written down while it is summed: on what the proof rests."""

from typing import Any

import torch
from torch import Tensor

from workers.contract import Strategy
from workers.measure.difference import apart, larger
from workers.parallel.buckets import GradientBuckets
from workers.parallel.compression import Handle
from workers.strategies.replica import Replica


class Witness:
    """An AllReduce that stands before another, and knows of the last step on this rank, flat:"""

    gradient: Tensor  # as the backward pass left it
    before: Tensor  # residual that the step found
    rest: Tensor  # residual that it left
    total: Tensor  # what all ranks then hold as their sum

    def __init__(self, watched: Any) -> None:
        self.watched = watched
        self.lost = 0.0  # the largest difference of a residual found from the one that the step before left

    def __call__(self, bucket: Tensor) -> Handle:
        self.gradient, self.before = bucket.clone(), self.residual(bucket).clone()
        left = getattr(self, "rest", torch.zeros_like(bucket))
        self.lost = larger(self.lost, apart(self.before, left))
        handle = self.watched(bucket)

        def end() -> None:
            if handle is not None:
                handle.wait()
            self.rest, self.total = self.residual(bucket).clone(), bucket.clone()

        return Handle(end)

    def residual(self, like: Tensor) -> Tensor:
        """What is kept, zero where nothing is."""
        residual: Tensor | None = getattr(self.watched, "residual", None)
        return torch.zeros_like(like) if residual is None else residual


def watched(strategy: Strategy) -> tuple[GradientBuckets, list[Witness]]:
    """The buckets of a strategy, and from here on a witness of each."""
    assert isinstance(strategy, Replica)
    buckets = strategy.gradients
    assert isinstance(buckets, GradientBuckets)
    witnesses = [Witness(each) for each in buckets.all_reduces]
    buckets.all_reduces[:] = witnesses
    return buckets, witnesses
