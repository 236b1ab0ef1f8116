"""What each rank sends of a bucket, by the papers' formulas, in one process: dense tensors, loops, nothing distributed.

The compressors of workers/parallel are held against it step by step. It shares with them the seeds and the way in which random
places are drawn, and no more.
"""

import math

import torch
from torch import Size, Tensor

from experiments.compress.methods import rank_seed
from workers.config import Config
from workers.parallel.lowrank import first_factor
from workers.parallel.sparse import drawn


class Reference:
    """One bucket of all ranks. It remembers what the method remembers: random generators, and PowerSGD's Q."""

    def __init__(self, method: str, config: Config, shapes: list[Size], *, feedback: bool) -> None:
        self.method, self.config, self.shapes, self.feedback = method, config, shapes, feedback
        self.drawing = torch.Generator().manual_seed(config.seed)
        ranks = range(config.world_size)
        self.rounding = [torch.Generator().manual_seed(rank_seed(config, rank)) for rank in ranks]
        self.qs: dict[int, Tensor] = {}  # by the matrix' place in the bucket

    def sent(self, values: list[Tensor]) -> list[Tensor]:
        """What each rank's message says, dense: `values` [n] a rank are gradient and residual, float64."""
        found: list[Tensor] = getattr(self, self.method)(values)
        return found

    def kept(self, values: list[Tensor]) -> int:
        return max(1, round(self.config.ratio * len(values[0])))

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

    def randomk(self, values: list[Tensor]) -> list[Tensor]:
        numel, k = len(values[0]), self.kept(values)
        places = drawn(numel, k, self.drawing)
        scale = 1.0 if self.feedback else numel / k  # unbiased where nothing comes later
        return [masked(value, places) * scale for value in values]

    def sign(self, values: list[Tensor]) -> list[Tensor]:
        return [torch.where(value >= 0, value.abs().mean(), -value.abs().mean()) for value in values]

    def powersgd(self, values: list[Tensor]) -> list[Tensor]:
        """Algorithm 1, each matrix by itself: the projection of every rank's M onto the columns of the sum of all M Q."""
        sent = [value.clone() for value in values]
        start = 0
        for index, shape in enumerate(self.shapes):
            end = start + shape.numel()
            if self.is_factored(shape):
                matrices = [value[start:end].view(shape[0], -1) for value in values]
                width, rank = matrices[0].shape[1], min(self.config.low_rank, *matrices[0].shape)
                q = self.qs.get(index, first_factor(Size((width, rank)), self.config.seed))
                basis = torch.linalg.qr(sum(matrices[1:], matrices[0]) @ q).Q
                self.qs[index] = sum(matrices[1:], matrices[0]).T @ basis
                for flat, matrix in zip(sent, matrices, strict=True):
                    flat[start:end] = (basis @ (basis.T @ matrix)).flatten()
            start = end
        return sent

    def is_factored(self, shape: Size) -> bool:
        if len(shape) < 2:
            return False
        height, width = shape[0], math.prod(shape[1:])
        return min(self.config.low_rank, height, width) * (height + width) < height * width


def masked(values: Tensor, places: Tensor) -> Tensor:
    """`values` at `places`, zero elsewhere."""
    sparse = torch.zeros_like(values)
    sparse[places] = values[places]
    return sparse
