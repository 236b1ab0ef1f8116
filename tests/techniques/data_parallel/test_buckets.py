"""Buckets: their layout, when hooks launch them, and the gradients that result."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from distlab.techniques.data_parallel.buckets import GradientBuckets, broadcast_parameters, layout
from tests.warm_ranks import Ranks

pytestmark = pytest.mark.timeout(120)


@given(st.lists(st.integers(1, 50), max_size=30), st.integers(1, 100))
def test_layout_fills_buckets_in_reverse_order(sizes: list[int], bucket_bytes: int) -> None:
    buckets = layout(sizes, bucket_bytes)
    assert [index for bucket in buckets for index in bucket] == list(reversed(range(len(sizes))))
    bucket_sizes = [sum(sizes[index] for index in bucket) for bucket in buckets]
    assert all(size >= bucket_bytes for size in bucket_sizes[:-1])
    for bucket, size in zip(buckets, bucket_sizes, strict=True):
        assert size - sizes[bucket[-1]] < bucket_bytes  # it was not full before its last one


def test_one_bucket_without_size_limit() -> None:
    assert layout([4, 8, 4], float("inf")) == [[2, 1, 0]]


class Branches(nn.Module):
    """Three layers in sequence, of which one can be skipped."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(3)).double()
        for parameter in self.parameters():
            parameter.data.copy_(torch.rand(parameter.shape, generator=generator, dtype=torch.float64))

    def forward(self, x: Tensor, skipped: int | None = None) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = x if index == skipped else layer(x).tanh()
        return x.sum()


def rows(rank: int, microbatch: int) -> Tensor:
    count = 1 + rank + microbatch
    return torch.arange(3.0 * count, dtype=torch.float64).view(count, 3) / (7 + rank)


def summed(group: dist.ProcessGroup, bucket_bytes: float, overlap: bool, skipped: int | None) -> dict[str, Any]:
    """Run two steps of two microbatches; return the second step's gradients and its launches with their times."""
    model, launched = Branches(), []

    def all_reduce(bucket: Tensor) -> Any:
        launched.append((bucket.numel(), inside[0]))
        return dist.all_reduce(bucket, group=group, async_op=True)

    inside = [""]
    buckets = GradientBuckets(model.parameters(), group, bucket_bytes, all_reduce=all_reduce, overlap=overlap)
    for _ in range(2):
        launched.clear()
        buckets.zero()
        for microbatch in range(2):
            inside[0] = f"backward {microbatch}"
            with buckets.accumulate(last=microbatch == 1):
                model(rows(group.rank(), microbatch), skipped if group.rank() == 0 else None).backward()
        inside[0] = "finish"
        buckets.finish()
    gradients = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    flat = {view.data_ptr() for bucket in buckets.buckets for view in bucket.flat.split(1)}
    return {
        "gradients": gradients,
        "launched": launched,
        "views": all(
            parameter.grad.data_ptr() in flat for parameter in model.parameters() if parameter.grad is not None
        ),
    }


def expected(world_size: int, skipped: int | None) -> list[Tensor]:
    model = Branches()
    for rank in range(world_size):
        for microbatch in range(2):
            model(rows(rank, microbatch), skipped if rank == 0 else None).backward()
    return [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize(("bucket_bytes", "overlap"), [(1, True), (100, True), (float("inf"), True), (100, False)])
@pytest.mark.parametrize("skipped", [None, 1])
def test_sums_over_ranks_and_microbatches(
    ranks: Ranks, world_size: int, bucket_bytes: float, overlap: bool, skipped: int | None
) -> None:
    wanted = expected(world_size, skipped)
    every_rank = ranks(world_size, summed, bucket_bytes, overlap, skipped)
    for result in every_rank:
        assert result["views"]
        for gradient, dense in zip(result["gradients"], wanted, strict=True):
            assert (gradient - dense).abs().max() <= 1e-12
        # Every rank launches the buckets in the same order, once per step, whichever layers were skipped.
        assert [size for size, _ in result["launched"]] == [size for size, _ in every_rank[0]["launched"]]
        moments = {moment for _, moment in result["launched"]}
        assert "backward 0" not in moments
        assert moments == {"finish"} if not overlap else "finish" not in moments or skipped is not None


def after_broadcast(group: dist.ProcessGroup) -> list[Tensor]:
    torch.manual_seed(group.rank())
    parameters = [torch.rand(3, 2), torch.rand(()), torch.rand(5)]
    broadcast_parameters(parameters, group)
    return parameters


def test_broadcast_copies_the_parameters_of_rank_0(ranks: Ranks) -> None:
    first, *others = ranks(3, after_broadcast)
    torch.manual_seed(0)
    assert torch.equal(first[0], torch.rand(3, 2))
    for other in others:
        assert all(torch.equal(one, two) for one, two in zip(first, other, strict=True))
