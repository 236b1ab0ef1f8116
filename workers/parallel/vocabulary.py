"""The two ends of a language model, cut by the rows of the vocabulary: embedding and cross-entropy.

The largest matrices of a small model stand here, and with tied weights they are one, so both ends cut it alike. What a
rank does not hold is another's: a token of another rank's rows adds zeros to the sum over the ranks; and of the scores,
as many as the vocabulary for each token, none is ever sent. A softmax needs of the others only its maximum and its sum
(Shoeybi et al. 2019, section 3: b·s numbers for b·s·v).
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from workers.parallel.phases import phase
from workers.parallel.slices import Slice
from workers.parallel.tensor import Region, all_reduce


class VocabularyParallelEmbedding(nn.Module):
    """Tokens to vectors, [rows, ...] to [rows, ..., D], summed over the ranks by `region`; this rank holds some
    vectors."""

    def __init__(self, dense: nn.Embedding, sizes: tuple[int, ...], rank: int, region: Region) -> None:
        super().__init__()
        self.slices = {"weight": Slice(0, sizes)}
        self.region = region
        self.first = self.slices["weight"].first(rank)
        self.weight = nn.Parameter(self.slices["weight"].piece(dense.weight, rank))

    def forward(self, tokens: Tensor) -> Tensor:
        own, rows = own_tokens(tokens, self.first, len(self.weight))
        partial = self.weight.new_zeros(*tokens.shape, self.weight.shape[1])
        partial[own] = F.embedding(rows, self.weight)  # [..., D]
        return self.region.leave(partial)


class VocabularyParallelCrossEntropy(nn.Module):
    """Sum over all tokens of -log p(token), from this rank's scores [..., V/tp]; the same number on every rank."""

    def __init__(self, sizes: tuple[int, ...], group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group = group
        self.first = Slice(0, sizes).first(group.rank())

    def forward(self, scores: Tensor, targets: Tensor) -> Tensor:
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32)).flatten(0, -2)
        return CrossEntropy.apply(scores, targets.flatten(), self.first, self.group)  # type: ignore[no-untyped-call, no-any-return]


class CrossEntropy(torch.autograd.Function):
    """Forward: two all_reduces, of the maxima, then of the sums and the targets' scores together. Backward: sends
    nothing."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, targets: Tensor, first: int, group: dist.ProcessGroup) -> Tensor:
        (own,), columns = own_tokens(targets, first, scores.shape[1])
        largest = scores.amax(dim=1)  # [B·S]
        with phase("all_reduce"):
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        shifted = scores - largest[:, None]
        both = shifted.new_zeros(2, len(targets))  # sums of exp(score), and the targets' scores
        both[1, own] = shifted[own, columns]
        torch.sum(shifted.exp_(), dim=1, out=both[0])
        all_reduce(both, group)
        ctx.save_for_backward(shifted.div_(both[0, :, None]), own, columns)
        return (both[0].log() - both[1]).sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        probabilities, own, columns = ctx.saved_tensors
        probabilities = probabilities * gradients[0]
        probabilities[own, columns] -= gradients[0]
        return probabilities, None, None, None


def own_tokens(tokens: Tensor, first: int, num_rows: int) -> tuple[tuple[Tensor, ...], Tensor]:
    """Where those of `tokens` stand that are `first` or one of the `num_rows - 1` after it, and which of these each
    is."""
    rows = tokens - first
    own = ((rows >= 0) & (rows < num_rows)).nonzero(as_tuple=True)
    return own, rows[own]
