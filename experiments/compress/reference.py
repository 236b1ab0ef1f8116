"""What each rank sends of a bucket, by the papers' formulas, in one process: dense tensors, loops, nothing distributed.

The compressors are held against it step by step. It gets the ranks' gradients and no more: the
residuals are its own (Karimireddy et al. 2019, algorithm 2: v = e + g, e = v - C(v)), so that what a rank forgets, or
keeps twice, shows in the next step's sum. It shares the seeds with them, and no code. Where a paper leaves a choice, it
is held by what it has to satisfy, below: the places of random-k, and PowerSGD.
"""

import math
from typing import Any

import torch
from torch import Size, Tensor

from distlab.contract import Strategy
from distlab.lab.config import Config
from distlab.lab.measure.tensors import TINY, larger, largest, largest_difference, over
from distlab.techniques.compression.compressors import Handle, rank_seed
from distlab.techniques.data_parallel.buckets import GradientBuckets
from distlab.techniques.data_parallel.strategy import Replica

from .options import Options

ROUNDING = {"fp16": 2.0**-11}  # of one addition on the wire, over the summands


class Reference:
    """One bucket of all ranks. It remembers what the method remembers: residuals and random generators."""

    def __init__(self, method: str, config: Config, *, feedback: bool) -> None:
        self.method, self.ratio, self.feedback = method, config.own(Options).ratio, feedback
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

    def fp16(self, values: list[Tensor]) -> list[Tensor]:
        most = torch.finfo(torch.float16).max / (len(values) + 1)
        return [value.clamp(-most, most).half().double() for value in values]

    def int8(self, values: list[Tensor]) -> list[Tensor]:
        """Codes between two integers, the upper one with the probability of the remainder; N of them within 127."""
        scale = max(value.abs().max().item() for value in values) / (127 // len(values))
        draws = [
            torch.rand(value.shape, generator=g, dtype=value.dtype).to(value.device)
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


def masked(values: Tensor, places: Tensor) -> Tensor:
    sparse = torch.zeros_like(values)
    sparse[places] = values[places]
    return sparse


def added(tensors: list[Tensor]) -> Tensor:
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


def watch_buckets(strategy: Strategy) -> list[Witness]:
    """From here on a witness of each bucket of a strategy."""
    assert isinstance(strategy, Replica)
    buckets = strategy.gradients
    assert isinstance(buckets, GradientBuckets)
    witnesses = [Witness(bucket.all_reduce) for bucket in buckets.buckets]
    for bucket, witness in zip(buckets.buckets, witnesses, strict=True):
        bucket.all_reduce = witness
    return witnesses


# PowerSGD's sum, held against what algorithm 1 makes of it whatever basis it took (Vogels et al. 2019).
#
# The algorithm leaves a choice: P' is any orthonormal basis of the columns of M Q, and where fewer than r of them are
# independent, any that holds theirs. That is no corner: an embedding's gradient has as many rows as the batch has
# distinct bytes, so its Q has columns of nothing but rounding. Two right programs take two bases there, and a step
# later, when the matrix has more rows, their sums differed by 0.45 of it. So no second program is run here. With S
# the sum of all ranks' matrices and R what all ranks hold for it,
#
#     (S - R) Q = 0       what lies in Q's space arrives whole
#     R^T (S - R) = 0     R is S projected onto a space, and nothing else
#     rank R <= r         a space of r dims at most (checks.py)
#
# hold for every choice, and where S Q has rank r, of P' P'^T S alone: the columns of R hold those of R Q = S Q, so
# they span the same space, and there is one projection onto it. The Q of a step needs no telling: R = P' (S^T P')^T,
# so the rows of one step's R span the next one's Q (warm start). Before the first step it is the one that the seed
# draws.
#
# Residuals are kept here as well, of all ranks together: what lies outside of R (section 3, error feedback).


class Projection:
    """One bucket of all ranks, step by step; `shapes` of the gradients in it, `feedback` if residuals are kept."""

    def __init__(self, config: Config, shapes: list[Size], *, feedback: bool) -> None:
        self.feedback, self.left = feedback, torch.zeros(())
        self.low_rank, self.seed, self.shapes = config.own(Options).low_rank, config.seed, shapes
        self.starts: dict[int, Tensor] = {}  # [n, *] by the matrix' place: its columns span this step's Q

    def judge(self, gradients: list[Tensor], total: Tensor) -> tuple[float, Tensor]:
        """How far `total` [n] is from the algorithm's, over what is summed, and what was sent: `total` itself.

        `gradients` [n] a rank, float64.
        """
        sizes = [shape.numel() for shape in self.shapes]
        summed = torch.stack(gradients).sum(dim=0) + self.left
        most = torch.stack([each.abs() for each in gradients]).sum(dim=0) + self.left.abs()
        self.left = summed - total if self.feedback else self.left
        sums, most_of = summed.split(sizes), most.split(sizes)
        worst = 0.0
        for index, (shape, s, r, size) in enumerate(zip(self.shapes, sums, total.split(sizes), most_of, strict=True)):
            if factored(shape, self.low_rank):
                found = self._projected(index, s.view(shape[0], -1), r.view(shape[0], -1), size.norm())
            else:
                found = over(s - r, size.norm())  # sent whole
            worst = max(worst, found)
        return worst, total

    def _projected(self, index: int, s: Tensor, r: Tensor, size: Tensor) -> float:
        rank = min(self.low_rank, *s.shape)
        draw = torch.Generator().manual_seed(self.seed)
        drawn = torch.randn(s.shape[1], rank, generator=draw, dtype=torch.float64)
        q = self.starts.get(index, drawn.to(s.device))
        self.starts[index] = r.T.clone()
        return max(over((s - r) @ q, size * q.norm()), over(r.T @ (s - r), size * size))


def factored(shape: Size, low_rank: int) -> bool:
    """Whether a gradient of this shape travels as two factors: where they are smaller."""
    if len(shape) < 2:
        return False
    m, n = shape[0], math.prod(shape[1:])
    r = min(low_rank, m, n)
    return r * m + r * n < m * n
