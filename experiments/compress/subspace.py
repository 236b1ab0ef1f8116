"""PowerSGD's sum, held against what algorithm 1 makes of it whatever basis it took (Vogels et al. 2019).

The algorithm leaves a choice: P' is any orthonormal basis of the columns of M Q, and where fewer than r of them are
independent, any that holds theirs. That is no corner: an embedding's gradient has as many rows as the batch has
distinct bytes, so its Q has columns of nothing but rounding. Two right programs take two bases there, and a step later,
when the matrix has more rows, their sums differed by 0.45 of it. So no second program is run here. With S the sum of
all ranks' matrices and R what all ranks hold for it,

    (S - R) Q = 0       what lies in Q's space arrives whole
    R^T (S - R) = 0     R is S projected onto a space, and nothing else
    rank R <= r         a space of r dims at most (proofs.py)

hold for every choice, and where S Q has rank r, of P' P'^T S alone: the columns of R hold those of R Q = S Q, so they
span the same space, and there is one projection onto it. The Q of a step needs no telling: R = P' (S^T P')^T, so the
rows of one step's R span the next one's Q (warm start). Before the first step it is the one that the seed draws.

Residuals are kept here as well, of all ranks together: what lies outside of R (section 3, error feedback).
"""

import math

import torch
from torch import Size, Tensor

from experiments.compress.predictions import own
from experiments.compress.reference import TINY
from workers.config import Config


class Projection:
    """One bucket of all ranks, step by step; `shapes` of the gradients in it, `feedback` if residuals are kept."""

    def __init__(self, config: Config, shapes: list[Size], *, feedback: bool) -> None:
        self.feedback, self.left = feedback, torch.zeros(())
        self.low_rank, self.seed, self.shapes = own(config).low_rank, config.seed, shapes
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
        q = self.starts.get(index, drawn)
        self.starts[index] = r.T.clone()
        return max(over((s - r) @ q, size * q.norm()), over(r.T @ (s - r), size * size))


def factored(shape: Size, low_rank: int) -> bool:
    """Whether a gradient of this shape travels as two factors: where they are smaller."""
    if len(shape) < 2:
        return False
    m, n = shape[0], math.prod(shape[1:])
    r = min(low_rank, m, n)
    return r * m + r * n < m * n


def over(tensor: Tensor, size: Tensor) -> float:
    """The tensor's norm over `size`; infinite where there is no number."""
    found = (tensor.norm() / size.clamp(min=TINY)).item()
    return found if math.isfinite(found) else math.inf
