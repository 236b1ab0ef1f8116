"""Attention in blocks and around the ring, compared with one process, with gradients."""

import math
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from distlab.techniques.context_parallel import ring
from distlab.techniques.context_parallel.costs import ring_rows, shift_rows
from distlab.techniques.context_parallel.ring import (
    Part,
    RingAttention,
    ShiftAttention,
    attend,
    attend_backward,
    backward_by_formula,
    by_formula,
    merge,
)
from distlab.techniques.context_parallel.strategy import Positions, contiguous, zigzag
from tests.techniques.context_parallel.attending import differences, max_over_ranks
from tests.warm_ranks import Ranks

pytestmark = pytest.mark.timeout(120)


# Blocks of attention compared with PyTorch's, and merged blocks compared with one block.


WAYS: dict[str, tuple[Callable[..., Part], Callable[..., tuple[Tensor, Tensor, Tensor]]]] = {
    "kernel": (attend, attend_backward),
    "formula": (by_formula, backward_by_formula),
}


def drawn(rows: int, keys: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(2, 3, length, 4, generator=generator, dtype=torch.float64) for length in (rows, keys, keys))
    return q.to(dtype).requires_grad_(), k.to(dtype).requires_grad_(), v.to(dtype).requires_grad_()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("causal", [False, True])
def test_a_block_equals_autograd(way: str, causal: bool) -> None:
    forward, backward = WAYS[way]
    q, k, v = drawn(5, 5 if causal else 3)
    wanted = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    gradient = torch.randn_like(wanted)
    wanted.backward(gradient)
    with torch.no_grad():
        part = forward(q, k, v, causal=causal)
        found = backward(gradient, q, k, v, part, causal=causal)
    assert (part.out - wanted).abs().max() < 1e-14
    for one, leaf in zip(found, (q, k, v), strict=True):
        assert leaf.grad is not None
        assert (one - leaf.grad).abs().max() < 1e-14
    scores = (q @ k.mT / 2).detach()
    if causal:
        scores = scores.masked_fill(torch.ones(5, 5, dtype=torch.bool).triu(1), -math.inf)
    assert (part.lse - scores.logsumexp(-1)).abs().max() < 1e-14


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("cut", [1, 4, 6])
def test_merged_key_blocks_equal_one_block(way: str, cut: int) -> None:
    forward, backward = WAYS[way]
    q, k, v = (each.detach() for each in drawn(5, 7))
    whole = forward(q, k, v, causal=False)
    gradient = torch.randn_like(whole.out)
    pieces = [(k[:, :, :cut], v[:, :, :cut]), (k[:, :, cut:], v[:, :, cut:])]
    merged = forward(q, *pieces[1], causal=False)
    merge(merged, forward(q, *pieces[0], causal=False))
    assert (merged.out - whole.out).abs().max() < 1e-14
    assert (merged.lse - whole.lse).abs().max() < 1e-14
    to_q, to_k, to_v = backward(gradient, q, k, v, whole, causal=False)
    parts = [backward(gradient, q, *piece, merged, causal=False) for piece in pieces]
    assert (parts[0][0] + parts[1][0] - to_q).abs().max() < 1e-14
    assert (torch.cat([parts[0][1], parts[1][1]], 2) - to_k).abs().max() < 1e-14
    assert (torch.cat([parts[0][2], parts[1][2]], 2) - to_v).abs().max() < 1e-14


def test_large_scores_do_not_overflow() -> None:
    q, k, v = (each.detach() * 1e3 for each in drawn(4, 6))
    merged = attend(q, k[:, :, :2], v[:, :, :2])
    merge(merged, attend(q, k[:, :, 2:], v[:, :, 2:]))
    assert (merged.out - attend(q, k, v).out).abs().max() < 1e-9


@pytest.mark.parametrize(("rows", "keys"), [(0, 3), (3, 0), (0, 0)])
def test_empty_rows_or_keys(rows: int, keys: int) -> None:
    q, k, v = (each.detach() for each in drawn(rows, keys))
    part = attend(q, k, v)
    assert part.out.shape == q.shape and not part.out.any()
    assert part.lse.shape == q.shape[:3] and (part.lse == -math.inf).all()
    assert [each.shape for each in attend_backward(q, q, k, v, part)] == [q.shape, k.shape, v.shape]


def test_a_block_without_keys_adds_nothing() -> None:
    q, k, v = (each.detach() for each in drawn(3, 4))
    part, wanted = attend(q, k, v), attend(q, k, v)
    merge(part, attend(q, k[:, :, :0], v[:, :, :0]))
    assert torch.equal(part.out, wanted.out) and torch.equal(part.lse, wanted.lse)


@pytest.mark.parametrize("way", WAYS)
def test_log_sum_exp_of_bfloat16_is_float32(way: str) -> None:
    q, k, v = (each.detach() for each in drawn(3, 4, torch.bfloat16))
    part = WAYS[way][0](q, k, v, causal=False)
    assert (part.out.dtype, part.lse.dtype) == (torch.bfloat16, torch.float32)


def test_rows_from_returns_views() -> None:
    part = Part(torch.zeros(1, 1, 3, 2), torch.zeros(1, 1, 3))
    part.rows_from(2).out.fill_(1)
    part.rows_from(2).lse.fill_(1)
    assert part.out.sum() == 2 and part.lse.sum() == 1


# Keys that travel around the ring, at any length and number of ranks; and what a wrong line breaks.


@pytest.mark.parametrize("cut", [contiguous, zigzag])
@pytest.mark.parametrize(
    ("world_size", "length", "heads"), [(1, 5, 2), (2, 8, 1), (3, 13, 2), (4, 5, 3), (4, 32, 1), (5, 2, 1)]
)
def test_ring_attention_equals_one_process(
    ranks: Ranks, cut: Callable[[int, int], Positions], world_size: int, length: int, heads: int
) -> None:
    found = ranks(world_size, differences, RingAttention, cut, length, heads)
    assert max(chain(*(errors.values() for errors, _ in found))) < 1e-14
    rows = cut(length, world_size).num_rows
    assert [calls for _, calls in found] == [
        sum(sent > 0 for sent in ring_rows(rows, rank)) for rank in range(world_size)
    ]


@pytest.mark.parametrize("cut", [contiguous, zigzag])
@pytest.mark.parametrize(
    ("world_size", "length", "heads"), [(1, 5, 2), (2, 8, 1), (3, 13, 2), (4, 5, 3), (4, 32, 1), (5, 2, 1)]
)
def test_shift_attention_equals_one_process(
    ranks: Ranks, cut: Callable[[int, int], Positions], world_size: int, length: int, heads: int
) -> None:
    found = ranks(world_size, differences, ShiftAttention, cut, length, heads)
    assert max(chain(*(errors.values() for errors, _ in found))) < 1e-14
    positions = cut(length, world_size)
    seen = [[positions.visible_keys(rank, other).num_keys for other in range(world_size)] for rank in range(world_size)]
    assert [calls for _, calls in found] == [
        sum(sent > 0 for sent in shift_rows(seen, rank)) for rank in range(world_size)
    ]


def average(part: Part, more: Part) -> None:
    part.out.add_(more.out).mul_(0.5)


class UnweightedMerge(RingAttention):
    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ring, "merge", average)
            return super().__call__(q, k, v)


class UnreturnedGradients(RingAttention):
    def return_gradients(self, parts: Iterator[tuple[int, Tensor]], own: Tensor) -> Tensor:
        for _ in parts:
            pass
        return own


def mask_by_local_positions(group: dist.ProcessGroup, positions: Positions) -> RingAttention:
    return RingAttention(group, contiguous(positions.length, group.size()))


def test_without_log_sum_exp_the_result_is_wrong(ranks: Ranks) -> None:
    found = ranks(2, differences, UnweightedMerge, zigzag, 8, 1)
    assert max_over_ranks(found, "out") > 1e-3


def test_key_gradients_that_are_not_returned_are_wrong(ranks: Ranks) -> None:
    found = ranks(3, differences, UnreturnedGradients, contiguous, 9, 1)
    assert max(max_over_ranks(found, "out"), max_over_ranks(found, "dq")) < 1e-14
    assert max_over_ranks(found, "dk") > 1e-3 and max_over_ranks(found, "dv") > 1e-3
    assert max(found[2][0].values()) < 1e-14  # no other rank attends to the last rank's keys


def test_a_mask_by_local_positions_is_detected(ranks: Ranks) -> None:
    found = ranks(2, differences, mask_by_local_positions, zigzag, 8, 1)
    assert max_over_ranks(found, "out") > 1e-3


class Additions(TorchDispatchMode):
    """The dtypes of tensors [B, heads, rows, head_dim] that are added to in place inside the block."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.types: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name in ("aten::add_", "aten::addcmul_") and args[0].dim() == 4:
            self.types.add(args[0].dtype)
        return func(*args, **(kwargs or {}))


def added_in(group: dist.ProcessGroup, kind: type[RingAttention], wrong: bool) -> set[torch.dtype]:
    """The dtypes in which partial results of bfloat16 are added, in the forward and backward pass."""
    positions = zigzag(8, group.size())
    shape = (1, 2, positions.num_rows[group.rank()], 8)
    q, k, v = (torch.ones(shape, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    seen = Additions()
    with pytest.MonkeyPatch.context() as patch, seen:
        if wrong:
            patch.setattr(ring, "sum_type", lambda x: x.dtype)
        kind(group, positions)(q, k, v).sum().backward()
    return seen.types


@pytest.mark.parametrize("kind", [RingAttention, ShiftAttention])
def test_partial_results_are_summed_in_float32(ranks: Ranks, kind: type[RingAttention]) -> None:
    """Proofs in float64 and losses do not show this."""
    assert ranks(2, added_in, kind, False) == [{torch.float32}] * 2
    assert ranks(2, added_in, kind, True) == [{torch.bfloat16}] * 2


def sources(group: dist.ProcessGroup) -> list[int]:
    """The ranks whose keys arrive, in order; each rank sends its own number."""
    ring = RingAttention(group, contiguous(6, group.size()))
    mine = torch.full((2, 1, 1, 6 // group.size(), 1), float(group.rank()))
    received = [(source, keys.unique().tolist()) for source, keys in ring.receive_keys(mine)]
    assert all(numbers == [source] for source, numbers in received)
    return [source for source, _ in received]


def test_keys_arrive_in_ring_order(ranks: Ranks) -> None:
    assert ranks(3, sources) == [[2, 1], [0, 2], [1, 0]]
