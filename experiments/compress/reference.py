"""What each rank sends of a bucket, by the papers' formulas, in one process: dense tensors, loops, nothing distributed.

The compressors of workers/parallel are held against it step by step. It gets the ranks' gradients and no more: the
residuals are its own (Karimireddy et al. 2019, algorithm 2: v = e + g, e = v - C(v)), so that what a rank forgets, or
keeps twice, shows in the next step's sum. It shares the seeds with them, and no code. Where a paper leaves a choice, it
is held by what it has to satisfy: the places of random-k by the sum (and properties.py), PowerSGD in properties.py.
"""

from typing import Any

import torch
from torch import Tensor

from distlab.compression.compressors import Handle
from distlab.config import Config
from distlab.contract import Strategy
from distlab.data_parallel.buckets import GradientBuckets
from distlab.data_parallel.strategy import Replica
from distlab.measure.tensors import larger, largest, largest_difference

from .predictions import options_of

ROUNDING = {"bf16": 2.0**-8, "fp16": 2.0**-11}  # of one addition on the wire, over the summands
TINY = torch.finfo(torch.float64).tiny


class Reference:
    """One bucket of all ranks. It remembers what the method remembers: residuals and random generators."""

    def __init__(self, method: str, config: Config, *, feedback: bool) -> None:
        self.method, self.ratio, self.feedback = method, options_of(config).ratio, feedback
        ranks = range(config.world_size)
        self.rounding = [torch.Generator().manual_seed(rank_seed(config.seed, rank)) for rank in ranks]
        self.residuals: list[Tensor] = []

    def judge(self, gradients: list[Tensor], total: Tensor) -> tuple[float, Tensor]:
        """How far the ranks' `total` [n] is from the sum of what each should have sent, over it, and that sum.

        `gradients` [n] a rank, float64.
        """
        residuals = self.residuals or [torch.zeros_like(each) for each in gradients]
        values = [gradient + residual for gradient, residual in zip(gradients, residuals, strict=True)]
        sent = self.randomk(values, total) if self.method == "randomk" else self.sent(values)
        if self.feedback:
            self.residuals = [value - of_rank for value, of_rank in zip(values, sent, strict=True)]
        size = added([each.abs() for each in sent])
        if self.method not in ROUNDING:  # a rounding is relative to its own number, all else to the largest one
            size = size.max()
        return largest((total - added(sent)) / size.clamp(min=TINY)), added(sent)

    def sent(self, values: list[Tensor]) -> list[Tensor]:
        """What each rank's message says, dense: `values` [n] a rank are gradient and residual, float64."""
        found: list[Tensor] = getattr(self, self.method)(values)
        return found

    def kept(self, values: list[Tensor]) -> int:
        return max(1, round(self.ratio * len(values[0])))

    def bf16(self, values: list[Tensor]) -> list[Tensor]:
        return [value.bfloat16().double() for value in values]

    def fp16(self, values: list[Tensor]) -> list[Tensor]:
        most = torch.finfo(torch.float16).max / (len(values) + 1)
        return [value.clamp(-most, most).half().double() for value in values]

    def int8(self, values: list[Tensor]) -> list[Tensor]:
        """Codes between two integers, the upper one with the probability of the remainder; N of them within 127."""
        scale = max(value.abs().max().item() for value in values) / (127 // len(values))
        draws = [
            torch.rand(value.shape, generator=g, dtype=value.dtype)
            for value, g in zip(values, self.rounding, strict=True)
        ]
        if scale == 0:
            return values
        return [torch.floor(value / scale + draw) * scale for value, draw in zip(values, draws, strict=True)]

    def topk(self, values: list[Tensor]) -> list[Tensor]:
        """The k largest; of equal ones the first."""
        sent = []
        for value in values:
            sizes = value.abs()
            candidates = (sizes >= sizes.topk(self.kept(values)).values[-1]).nonzero().flatten()
            order = sizes[candidates].sort(descending=True, stable=True).indices
            sent.append(masked(value, candidates[order[: self.kept(values)]]))
        return sent

    def randomk(self, values: list[Tensor], total: Tensor) -> list[Tensor]:
        """At most k places, which are those where there is a sum: all ranks have to have drawn the same."""
        places, k = total.nonzero().flatten(), self.kept(values)
        scale = 1.0 if self.feedback else len(total) / k  # unbiased where nothing comes later
        return [masked(value, places[:k]) * scale for value in values]

    def sign(self, values: list[Tensor]) -> list[Tensor]:
        return [torch.where(value >= 0, value.abs().mean(), -value.abs().mean()) for value in values]


def rank_seed(seed: int, rank: int) -> int:
    """A seed of this rank's own."""
    return 1_000_003 * seed + rank


def masked(values: Tensor, places: Tensor) -> Tensor:
    """`values` at `places`, zero elsewhere."""
    sparse = torch.zeros_like(values)
    sparse[places] = values[places]
    return sparse


def added(tensors: list[Tensor]) -> Tensor:
    """Their sum, in rank order."""
    return sum(tensors[1:], tensors[0])


# What a bucket gets, gives and keeps, written down while it is summed: on what the proof rests.


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
        self.lost = larger(self.lost, largest_difference(self.before, left))
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


def watch_buckets(strategy: Strategy) -> tuple[GradientBuckets, list[Witness]]:
    """The buckets of a strategy, and from here on a witness of each."""
    assert isinstance(strategy, Replica)
    buckets = strategy.gradients
    assert isinstance(buckets, GradientBuckets)
    witnesses = [Witness(each) for each in buckets.all_reduces]
    buckets.all_reduces[:] = witnesses
    return buckets, witnesses
