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
"""

import math

import torch
from torch import Size, Tensor

from experiments.compress.predictions import own
from experiments.compress.reference import TINY
from workers.config import Config
from workers.parallel.lowrank import first_factor, pays


class Projection:
    """One bucket of all ranks, step by step; `shapes` of the gradients in it."""

    def __init__(self, config: Config, shapes: list[Size]) -> None:
        self.low_rank, self.seed, self.shapes = own(config).low_rank, config.seed, shapes
        self.starts: dict[int, Tensor] = {}  # [n, *] by the matrix' place: its columns span this step's Q

    def judge(self, values: list[Tensor], total: Tensor) -> tuple[float, Tensor]:
        """How far `total` [n] is from the algorithm's, over what is summed, and what was sent: `total` itself.

        `values` [n] a rank are gradient and residual, float64.
        """
        sizes = [shape.numel() for shape in self.shapes]
        sums, most = (torch.stack(each).sum(dim=0).split(sizes) for each in (values, [v.abs() for v in values]))
        worst = 0.0
        for index, (shape, s, r, size) in enumerate(zip(self.shapes, sums, total.split(sizes), most, strict=True)):
            if pays(shape, self.low_rank):
                found = self._projected(index, s.view(shape[0], -1), r.view(shape[0], -1), size.norm())
            else:
                found = over(s - r, size.norm())  # sent whole
            worst = max(worst, found)
        return worst, total

    def _projected(self, index: int, s: Tensor, r: Tensor, size: Tensor) -> float:
        rank = min(self.low_rank, *s.shape)
        drawn = first_factor(Size((s.shape[1], rank)), self.seed)
        q = self.starts.get(index, drawn)
        self.starts[index] = r.T.clone()
        return max(over((s - r) @ q, size * q.norm()), over(r.T @ (s - r), size * size))


def over(tensor: Tensor, size: Tensor) -> float:
    """The tensor's norm over `size`; infinite where there is no number."""
    found = (tensor.norm() / size.clamp(min=TINY)).item()
    return found if math.isfinite(found) else math.inf
