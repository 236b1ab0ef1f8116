"""Embedding and cross-entropy over a vocabulary in parts, against the dense ones, at uneven parts and extreme
scores."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from distlab.measure.traffic import Calls
from distlab.tensor_parallel.layers import (
    Sequence,
    VocabularyParallelCrossEntropy,
    VocabularyParallelEmbedding,
    Whole,
    shares,
)
from distlab.testing.warm_ranks import Ranks

pytestmark = pytest.mark.timeout(120)
WIDTH = 3


def embedded(group: dist.ProcessGroup, vocabulary: int, by_rows: bool, all_the_same: bool) -> list[float]:
    """Differences to the dense embedding: of the vectors, and of the gradient of this rank's part."""
    generator = torch.Generator().manual_seed(5)
    dense = nn.Embedding.from_pretrained(torch.randn(vocabulary, WIDTH, generator=generator).double(), freeze=False)
    tokens = torch.zeros(5, 2, dtype=torch.long)  # every rank but the first has none of them
    if not all_the_same:
        tokens = torch.randint(vocabulary, (5, 2), generator=generator)
    sizes = shares(vocabulary, group.size())
    region = Sequence(group) if by_rows else Whole(group)
    part = VocabularyParallelEmbedding(dense, sizes, group.rank(), region)
    found, wanted = part(tokens), dense(tokens)
    factor = torch.arange(30.0).view(5, 2, WIDTH).double()  # a gradient that differs from place to place
    (wanted * factor).sum().backward()
    if isinstance(region, Sequence):
        wanted, factor = region.own(wanted), region.own(factor)
    (found * factor).sum().backward()
    assert part.weight.grad is not None and dense.weight.grad is not None
    gradient = part.slices["weight"].piece(dense.weight.grad, group.rank())
    return [(found - wanted).abs().sum().item(), (part.weight.grad - gradient).abs().sum().item()]


@pytest.mark.parametrize("by_rows", [False, True])
@pytest.mark.parametrize("all_the_same", [False, True])
@pytest.mark.parametrize(("world_size", "vocabulary"), [(1, 4), (2, 8), (3, 7), (4, 4), (4, 9)])
def test_an_embedding_in_parts_is_the_dense_one(
    ranks: Ranks, world_size: int, vocabulary: int, by_rows: bool, all_the_same: bool
) -> None:
    for of_rank in ranks(world_size, embedded, vocabulary, by_rows, all_the_same):
        assert max(of_rank) < 1e-12


def losses(group: dist.ProcessGroup, vocabulary: int, scale: float, dtype: torch.dtype) -> dict[str, Any]:
    """The loss, its differences to the dense one, and the calls that it makes."""
    generator = torch.Generator().manual_seed(6)
    dense = (torch.randn(4, 3, vocabulary, generator=generator).double() * scale).to(dtype).requires_grad_()
    targets = torch.randint(vocabulary, (4, 3), generator=generator)
    sizes = shares(vocabulary, group.size())
    scores = dense.detach().split(sizes, -1)[group.rank()].clone().requires_grad_()
    with Calls() as calls:
        loss = VocabularyParallelCrossEntropy(sizes, group)(scores, targets)
        (loss * 0.5).backward()
    wide = dense.to(torch.promote_types(dtype, torch.float32))
    wanted = F.cross_entropy(wide.flatten(0, -2), targets.flatten(), reduction="sum")
    (wanted * 0.5).backward()
    assert dense.grad is not None and scores.grad is not None
    return {
        "loss": loss.item(),
        "apart": abs(loss.item() - wanted.item()) / abs(wanted.item()),
        "gradient": (scores.grad - dense.grad.split(sizes, -1)[group.rank()]).abs().max().item(),
        "sent": [(op.op, op.calls, op.raw_bytes) for op in calls.ops()],
    }


@pytest.mark.parametrize("scale", [1.0, 1e4])  # exp of the second is infinite without its maximum
@pytest.mark.parametrize(("world_size", "vocabulary"), [(1, 4), (2, 8), (3, 256), (4, 7)])
def test_a_loss_in_parts_is_the_dense_one_and_the_same_on_every_rank(
    ranks: Ranks, world_size: int, vocabulary: int, scale: float
) -> None:
    found = ranks(world_size, losses, vocabulary, scale, torch.float64)
    assert len({of_rank["loss"] for of_rank in found}) == 1  # to the bit
    for of_rank in found:
        assert of_rank["apart"] < 1e-13 and of_rank["gradient"] < 1e-13
        assert of_rank["sent"] == [("all_reduce", 2, 3 * 12 * 8)]  # three numbers a token, and no scores


def test_16_bit_scores_are_summed_in_32(ranks: Ranks) -> None:
    for of_rank in ranks(2, losses, 8, 1.0, torch.bfloat16):
        assert of_rank["apart"] < 1e-6
        assert of_rank["gradient"] < 1e-2
        assert of_rank["sent"] == [("all_reduce", 2, 3 * 12 * 4)]
