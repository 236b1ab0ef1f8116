"""PowerSGD: each weight matrix's gradient as a product of two thin ones (Vogels et al. 2019, algorithm 1).

    M [m, n]  this rank's gradient and residual       P [m, r] = M Q     all-reduced, then orthonormal columns P'
    Q [n, r]  of the step before (warm start)         Q [n, r] = M^T P'  all-reduced;  the sum of M is about P' Q^T

This is one step of subspace iteration on the sum of all ranks' matrices: both products are linear in M and both are
summed over the ranks, so P' is equal on all and the result has rank r, for any number of ranks. If every rank
compressed alone, with its own random factors, the sum would have rank N·r and need N times the bytes, or a dense
tensor. The first Q is drawn from one seed; each later one is the last sum, whose directions carried most. Biases, gains
and matrices too small to gain are sent uncompressed, in the message of P. So a bucket costs two calls: all P and the
uncompressed tensors, then all Q.
"""

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Size, Tensor

from distlab.techniques.compression.compressors import Compressor, Handle


class LowRank(Compressor):
    """PowerSGD of rank `rank` for a bucket whose members have `shapes`; `seed` is the same on every rank.

    A tensor of more than two dims becomes a matrix: its first dim by the product of all others.
    """

    def __init__(
        self, group: dist.ProcessGroup, shapes: Sequence[Size], rank: int, seed: int, *, feedback: bool
    ) -> None:
        super().__init__(group, feedback=feedback)
        self.shapes, self.rank, self.seed = shapes, rank, seed
        self.factors: Factors | None = None

    def __call__(self, bucket: Tensor) -> Handle:
        values = self.with_residual(bucket)
        matrices, uncompressed = self.members(values)
        if self.factors is None:
            self.factors = Factors(matrices, uncompressed, self.rank, self.seed)
        factors = self.factors
        for matrix, p, q in zip(matrices, factors.ps, factors.qs, strict=True):
            # Same column space; without this, M Q would grow like the square of the gradients, beyond float32's range.
            q.copy_(orthonormal(q))
            torch.mm(matrix, q, out=p)
        for tensor, place in zip(uncompressed, factors.uncompressed, strict=True):
            place.copy_(tensor)
        work = dist.all_reduce(factors.first_message, group=self.group, async_op=True)

        def end() -> None:
            work.wait()
            self.second_half(factors, values)
            self.decode(factors, bucket)
            if self.feedback:
                # Each rank takes an equal share of the common result: only the sum of all residuals matters.
                values.sub_(bucket, alpha=1 / self.group.size())
                for tensor in uncompressed:
                    tensor.zero_()

        return Handle(end)

    def second_half(self, factors: "Factors", values: Tensor) -> None:
        matrices, _ = self.members(values)
        for matrix, p, q in zip(matrices, factors.ps, factors.qs, strict=True):
            p.copy_(orthonormal(p))
            torch.mm(matrix.T, p, out=q)
        if matrices:
            dist.all_reduce(factors.second_message, group=self.group)

    def decode(self, factors: "Factors", bucket: Tensor) -> None:
        matrices, uncompressed = self.members(bucket)
        for matrix, p, q in zip(matrices, factors.ps, factors.qs, strict=True):
            torch.mm(p, q.T, out=matrix)
        for tensor, place in zip(uncompressed, factors.uncompressed, strict=True):
            tensor.copy_(place)

    def members(self, flat: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Return views of a bucket: the matrices that are factored, [m, n] each, and the others, flat."""
        pieces = list(zip(self.shapes, flat.split([shape.numel() for shape in self.shapes]), strict=True))
        matrices = [piece.view(shape[0], -1) for shape, piece in pieces if pays(shape, self.rank)]
        return matrices, [piece for shape, piece in pieces if not pays(shape, self.rank)]


class Factors:
    """The tensors that a bucket's ranks sum: all P and the uncompressed tensors in one, all Q in another."""

    def __init__(self, matrices: list[Tensor], uncompressed: list[Tensor], rank: int, seed: int) -> None:
        like = [*matrices, *uncompressed][0]
        ranks = [min(rank, *matrix.shape) for matrix in matrices]
        self.first_message, views = flat_of(
            [(len(m), r) for m, r in zip(matrices, ranks, strict=True)] + [w.shape for w in uncompressed], like
        )
        self.second_message, self.qs = flat_of([(m.shape[1], r) for m, r in zip(matrices, ranks, strict=True)], like)
        self.ps, self.uncompressed = views[: len(matrices)], views[len(matrices) :]
        for q in self.qs:
            q.copy_(first_factor(q.shape, seed))


def flat_of(shapes: Sequence[Sequence[int]], like: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Return a flat tensor for `shapes`, and a view of it for each."""
    sizes = [Size(shape).numel() for shape in shapes]
    flat = like.new_empty(sum(sizes))
    return flat, [piece.view(*shape) for shape, piece in zip(shapes, flat.split(sizes), strict=True)]


def factors(shape: Sequence[int], low_rank: int) -> int:
    """Return how many numbers PowerSGD sends for a gradient: r(m + n), or all of it where that is no less."""
    numel = math.prod(shape)
    if len(shape) < 2:
        return numel
    height, width = shape[0], math.prod(shape[1:])
    return min(min(low_rank, height, width) * (height + width), numel)


def pays(shape: Size, rank: int) -> bool:
    """Return whether a gradient of this shape is smaller as two factors."""
    return factors(shape, rank) < shape.numel()


def first_factor(shape: Size, seed: int) -> Tensor:
    """Return Q of the first step: seeded normal numbers, equal on all ranks and for all matrices of the same width."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def orthonormal(columns: Tensor) -> Tensor:
    """Return an orthonormal basis of the columns of [m, r], r <= m.

    Householder's QR also works for zero and dependent columns, where Gram-Schmidt would divide by zero; it takes 10 us
    for [320, 4]. P is equal on all ranks, so the basis is too, to the bit.
    """
    wide = columns.to(torch.promote_types(columns.dtype, torch.float32))  # QR has no 16-bit version
    basis: Tensor = torch.linalg.qr(wide).Q
    return basis.to(columns.dtype)
