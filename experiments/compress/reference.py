"""The expected messages of each rank by the papers' formulas, in one process: dense tensors and loops.

Compressors are compared with it step by step. Its only inputs are the ranks' gradients; it keeps its own residuals
(Karimireddy et al. 2019, algorithm 2: v = e + g, e = v - C(v)), so if a rank loses or repeats a residual, the next
step's sum differs. It has the same seeds, but shares no code. Where a paper leaves a choice (random-k's positions,
PowerSGD), the result must satisfy the conditions below.
"""

import math
from typing import Any

import torch
from torch import Size, Tensor

from distlab.contract import Strategy
from distlab.lab.config import Config
from distlab.lab.measure.tensors import TINY, larger, largest, largest_difference, relative_norm
from distlab.techniques.compression.compressors import Handle, rank_seed
from distlab.techniques.data_parallel.buckets import GradientBuckets
from distlab.techniques.data_parallel.strategy import Replica

from .options import Options

ROUNDING = {"fp16": 2.0**-11}  # of one addition in the sum, relative to the summands


class Reference:
    """One bucket of all ranks, with the state of the method: residuals and random generators."""

    def __init__(self, method: str, config: Config, *, feedback: bool) -> None:
        self.method, self.ratio, self.feedback = method, config.own(Options).ratio, feedback
        ranks = range(config.world_size)
        self.rounding = [torch.Generator().manual_seed(rank_seed(config.seed, rank)) for rank in ranks]
        self.residuals: list[Tensor] = []

    def judge(self, gradients: list[Tensor], total: Tensor) -> tuple[float, Tensor]:
        """Return the relative error of the ranks' `total` [n] against the expected sum, and that sum.

        `gradients` are float64 [n] per rank.
        """
        residuals = self.residuals or [torch.zeros_like(each) for each in gradients]
        values = [gradient + residual for gradient, residual in zip(gradients, residuals, strict=True)]
        sent = self.randomk(values, total) if self.method == "randomk" else self.sent(values)
        if self.feedback:
            self.residuals = [value - of_rank for value, of_rank in zip(values, sent, strict=True)]
        size = added([each.abs() for each in sent])
        if self.method not in ROUNDING:  # rounding is relative to each number, other errors to the largest one
            size = size.max()
        return largest((total - added(sent)) / size.clamp(min=TINY)), added(sent)

    def sent(self, values: list[Tensor]) -> list[Tensor]:
        """Return each rank's message as a dense tensor; `values` [n] per rank are gradient plus residual, float64."""
        found: list[Tensor] = getattr(self, self.method)(values)
        return found

    def num_sent(self, values: list[Tensor]) -> int:
        return max(1, round(self.ratio * len(values[0])))

    def fp16(self, values: list[Tensor]) -> list[Tensor]:
        most = torch.finfo(torch.float16).max / (len(values) + 1)
        return [value.clamp(-most, most).half().double() for value in values]

    def int8(self, values: list[Tensor]) -> list[Tensor]:
        """Return codes rounded up with the probability of the remainder; N of them are within 127."""
        scale = max(value.abs().max().item() for value in values) / (127 // len(values))
        draws = [
            torch.rand(value.shape, generator=g, dtype=value.dtype).to(value.device)
            for value, g in zip(values, self.rounding, strict=True)
        ]
        if scale == 0:
            return values
        return [torch.floor(value / scale + draw) * scale for value, draw in zip(values, draws, strict=True)]

    def topk(self, values: list[Tensor]) -> list[Tensor]:
        """Return the k largest; among equal ones the first."""
        sent = []
        for value in values:
            sizes = value.abs()
            candidates = (sizes >= sizes.topk(self.num_sent(values)).values[-1]).nonzero().flatten()
            order = sizes[candidates].sort(descending=True, stable=True).indices
            sent.append(masked(value, candidates[order[: self.num_sent(values)]]))
        return sent

    def randomk(self, values: list[Tensor], total: Tensor) -> list[Tensor]:
        """Return the numbers at the nonzero positions of the sum, at most k: all ranks must have drawn the same."""
        places, k = total.nonzero().flatten(), self.num_sent(values)
        scale = 1.0 if self.feedback else len(total) / k  # unbiased if nothing is sent later
        return [masked(value, places[:k]) * scale for value in values]


def masked(values: Tensor, places: Tensor) -> Tensor:
    sparse = torch.zeros_like(values)
    sparse[places] = values[places]
    return sparse


def added(tensors: list[Tensor]) -> Tensor:
    return sum(tensors[1:], tensors[0])


# A record of each bucket's input, output and residual during the sum, for the proof.


class Witness:
    """An AllReduce that wraps another and records this rank's last step, flat:"""

    gradient: Tensor  # from the backward pass
    before: Tensor  # residual at the start of the step
    after: Tensor  # residual at its end
    total: Tensor  # the sum, on all ranks

    def __init__(self, watched: Any) -> None:
        self.watched = watched
        self.lost = 0.0  # the largest difference between a step's first residual and the last one of the step before

    def __call__(self, bucket: Tensor) -> Handle:
        self.gradient, self.before = bucket.clone(), self.residual(bucket).clone()
        last_residual = getattr(self, "after", torch.zeros_like(bucket))
        self.lost = larger(self.lost, largest_difference(self.before, last_residual))
        handle = self.watched(bucket)

        def end() -> None:
            if handle is not None:
                handle.wait()
            self.after, self.total = self.residual(bucket).clone(), bucket.clone()

        return Handle(end)

    def residual(self, like: Tensor) -> Tensor:
        """Return the residual, or zeros if there is none."""
        residual: Tensor | None = getattr(self.watched, "residual", None)
        return torch.zeros_like(like) if residual is None else residual


def watch_buckets(strategy: Strategy) -> list[Witness]:
    """Wrap each bucket of a strategy in a witness from now on."""
    assert isinstance(strategy, Replica)
    buckets = strategy.gradients
    assert isinstance(buckets, GradientBuckets)
    witnesses = [Witness(bucket.all_reduce) for bucket in buckets.buckets]
    for bucket, witness in zip(buckets.buckets, witnesses, strict=True):
        bucket.all_reduce = witness
    return witnesses


# PowerSGD's sum, checked by conditions that algorithm 1 satisfies for any basis (Vogels et al. 2019).
#
# The algorithm leaves a choice: P' is any orthonormal basis of the columns of M Q, and if fewer than r of them are
# independent, any basis that includes them. This is common: an embedding's gradient has as many rows as the batch has
# distinct bytes, so some columns of its Q are only rounding. Two correct programs choose different bases there, and a
# step later, when the matrix has more rows, their sums differed by 0.45 of it. So no second program is run here. With S
# the sum of all ranks' matrices and R the result on all ranks,
#
#     (S - R) Q = 0       the part in Q's space arrives completely
#     R^T (S - R) = 0     R is S projected onto a space, and nothing else
#     rank R <= r         a space of r dims at most (checks.py)
#
# hold for every choice, and where S Q has rank r, of P' P'^T S alone: the columns of R hold those of R Q = S Q, so
# they span the same space, and there is one projection onto it. The Q of a step need not be sent: R = P' (S^T P')^T,
# so the rows of one step's R span the next one's Q (warm start). Before the first step it is the one that the seed
# draws.
#
# Residuals are kept here as well, of all ranks together: what lies outside of R (section 3, error feedback).


class Projection:
    """One bucket of all ranks, step by step; `shapes` of its gradients, `feedback` if residuals are kept."""

    def __init__(self, config: Config, shapes: list[Size], *, feedback: bool) -> None:
        self.feedback, self.residual = feedback, torch.zeros(())
        self.low_rank, self.seed, self.shapes = config.own(Options).low_rank, config.seed, shapes
        self.starts: dict[int, Tensor] = {}  # [n, *] by the matrix' index: its columns span this step's Q

    def judge(self, gradients: list[Tensor], total: Tensor) -> tuple[float, Tensor]:
        """Return the relative error of `total` [n] against the algorithm, and the sent sum: `total` itself.

        `gradients` are float64 [n] per rank.
        """
        sizes = [shape.numel() for shape in self.shapes]
        summed = torch.stack(gradients).sum(dim=0) + self.residual
        most = torch.stack([each.abs() for each in gradients]).sum(dim=0) + self.residual.abs()
        self.residual = summed - total if self.feedback else self.residual
        sums, most_of = summed.split(sizes), most.split(sizes)
        worst = 0.0
        for index, (shape, s, r, size) in enumerate(zip(self.shapes, sums, total.split(sizes), most_of, strict=True)):
            if factored(shape, self.low_rank):
                found = self._projected(index, s.view(shape[0], -1), r.view(shape[0], -1), size.norm())
            else:
                found = relative_norm(s - r, size.norm())  # sent uncompressed
            worst = max(worst, found)
        return worst, total

    def _projected(self, index: int, s: Tensor, r: Tensor, size: Tensor) -> float:
        rank = min(self.low_rank, *s.shape)
        draw = torch.Generator().manual_seed(self.seed)
        drawn = torch.randn(s.shape[1], rank, generator=draw, dtype=torch.float64)
        q = self.starts.get(index, drawn.to(s.device))
        self.starts[index] = r.T.clone()
        return max(relative_norm((s - r) @ q, size * q.norm()), relative_norm(r.T @ (s - r), size * size))


def factored(shape: Size, low_rank: int) -> bool:
    """Return whether a gradient of this shape is sent as two factors: if they are smaller."""
    if len(shape) < 2:
        return False
    m, n = shape[0], math.prod(shape[1:])
    r = min(low_rank, m, n)
    return r * m + r * n < m * n
