"""Every compressor: ranks get equal sums, the residual keeps the rest, and bytes equal the formula, at extreme sizes
and values."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Size, Tensor, nn

from distlab.experiments.compress.predictions import bucket_bytes, bucket_calls
from distlab.lab.measure.traffic import Calls
from distlab.techniques.compression.compressors import (
    Cast,
    Compressor,
    Quantised,
    RandomK,
    TopK,
    draw_places,
    largest,
    rank_seed,
)
from distlab.techniques.compression.powersgd import LowRank, orthonormal
from distlab.techniques.data_parallel.buckets import GradientBuckets
from tests.labs import sampling_errors
from tests.warm_ranks import Ranks

RATIO, RANK = 0.1, 2
MAKE: dict[str, Callable[[dist.ProcessGroup, list[Size], bool], Compressor]] = {
    "fp16": lambda group, shapes, on: Cast(group, feedback=on),
    "int8": lambda group, shapes, on: Quantised(group, group.rank(), feedback=on),
    "topk": lambda group, shapes, on: TopK(group, RATIO, feedback=on),
    "randomk": lambda group, shapes, on: RandomK(group, RATIO, 5, feedback=on),
    "powersgd": lambda group, shapes, on: LowRank(group, shapes, RANK, 5, feedback=on),
}
BUCKETS = [[Size([1])], [Size([3, 5]), Size([3])], [Size([9, 12]), Size([12]), Size([6, 2, 8]), Size([2, 2])]]
KINDS: dict[str, Callable[[int, int], Tensor]] = {
    "normal": lambda numel, seed: torch.randn(numel, generator=torch.Generator().manual_seed(seed)),
    "zero": lambda numel, seed: torch.zeros(numel),
    "constant": lambda numel, seed: torch.full((numel,), -3.0),
    "huge": lambda numel, seed: 1e30 * torch.randn(numel, generator=torch.Generator().manual_seed(seed)),
    "tiny": lambda numel, seed: 1e-42 * torch.randn(numel, generator=torch.Generator().manual_seed(seed)),
}
EXACT = 1e-6  # of float32, over the largest number
ADDED_IN = {"fp16": 2.0**-11}


def trial(group: dist.ProcessGroup, steps: int) -> list[tuple[Any, ...]]:
    """For every method, bucket and kind of numbers: the relative error, whether all is finite, and the last sum."""
    found = []
    for method, make in MAKE.items():
        for shapes in BUCKETS:
            for kind, numbers in KINDS.items():
                numel = sum(shape.numel() for shape in shapes)
                compressor = make(group, shapes, True)
                before = torch.zeros(numel, dtype=torch.float64)
                lost = 0.0
                for step in range(steps):
                    bucket = numbers(numel, 100 * step + group.rank())
                    incoming = before + summed(group, bucket)
                    size = (summed(group, bucket.abs()) + before.abs()).max().item()
                    compressor(bucket).wait()
                    assert compressor.residual is not None
                    before = summed(group, compressor.residual)
                    off = (bucket.double() + before - incoming).abs().max().item()
                    lost = max(lost, off / max(size, torch.finfo(torch.float32).tiny))
                found.append((method, numel, kind, lost, bucket.isfinite().all().item(), bucket))
    return found


def summed(group: dist.ProcessGroup, tensor: Tensor) -> Tensor:
    total = tensor.to(torch.float64, copy=True)
    dist.all_reduce(total, group=group)
    return total


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_no_gradient_is_lost_and_ranks_agree(ranks: Ranks, world_size: int) -> None:
    every_rank = ranks(world_size, trial, 3)
    for of_ranks in zip(*every_rank, strict=True):
        method, numel, kind, lost, finite, bucket = of_ranks[0]
        label = (method, numel, kind)
        assert finite, label
        # Sums in 16 bits are rounded on every hop; a number too large for fp16 stays in the residual.
        assert lost <= EXACT + 4 * world_size * ADDED_IN.get(method, 0.0), label
        assert all(torch.equal(bucket, other[-1]) for other in of_ranks), label
        if kind == "zero":
            assert not bucket.any(), label


def without_feedback(group: dist.ProcessGroup) -> dict[str, tuple[int, float, float, bool]]:
    """For each method: calls, sent bytes, the formula's bytes, whether there is no residual; float64 as in proofs."""
    found, shapes = {}, BUCKETS[-1]
    for method, make in MAKE.items():
        compressor = make(group, shapes, False)
        with Calls() as calls:
            compressor(torch.randn(sum(shape.numel() for shape in shapes), dtype=torch.float64)).wait()
        ops = calls.ops()
        formula = bucket_bytes(method, group.size(), shapes, 8, ratio=RATIO, low_rank=RANK)
        assert sum(op.calls for op in ops) == bucket_calls(method, shapes, RANK), method
        found[method] = (len(ops), sum(op.called_bytes for op in ops), formula, compressor.residual is None)
    return found


def test_sent_bytes_equal_the_formula_without_feedback(ranks: Ranks) -> None:
    for found in ranks(3, without_feedback):
        for method, (_, called, formula, without_residual) in found.items():
            assert called == pytest.approx(formula, rel=1e-12), method
            assert without_residual, method


def low_rank_sums(group: dist.ProcessGroup) -> list[tuple[int, float]]:
    """The rank of a compressed sum and its error, for random matrices and for matrices of rank RANK."""
    found = []
    for shared in (False, True):
        compressor = LowRank(group, [Size([9, 12])], RANK, 5, feedback=False)
        columns = torch.randn(9, RANK, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        own = torch.Generator().manual_seed(10 + group.rank())
        matrix = columns @ torch.randn(RANK, 12, generator=own, dtype=torch.float64)
        bucket = (matrix if shared else torch.randn(9, 12, generator=own, dtype=torch.float64)).flatten()
        dense = summed(group, bucket)
        compressor(bucket).wait()
        rank = int(torch.linalg.matrix_rank(bucket.view(9, 12), rtol=1e-10))
        found.append((rank, (bucket - dense).abs().max().item()))
    return found


def test_powersgd_is_exact_for_matrices_of_its_rank(ranks: Ranks) -> None:
    for (rank, off), (_, exact) in ranks(4, low_rank_sums):
        assert rank == RANK
        assert off > 0.1
        assert exact < 1e-12


def test_orthonormal_columns_of_degenerate_matrices() -> None:
    for columns in (torch.zeros(5, 3), torch.ones(5, 3), torch.randn(5, 3), torch.randn(3, 3).bfloat16()):
        basis = orthonormal(columns)
        assert basis.dtype == columns.dtype
        tolerance = 1e-6 if basis.dtype == torch.float32 else 0.05
        assert (basis.T @ basis - torch.eye(3)).abs().max() < tolerance
    flat = torch.randn(6, 2) @ torch.randn(2, 3)  # of rank 2: the basis spans it, whatever its third column is
    basis = orthonormal(flat)
    assert torch.allclose(basis @ (basis.T @ flat), flat, atol=1e-5)


@pytest.mark.parametrize("numel", [1, 9, 1000, 200_000])
def test_largest_equals_a_stable_sort(numel: int) -> None:
    torch.manual_seed(numel)
    cases = {
        "normal": torch.randn(numel),
        "ties": torch.randint(-3, 4, (numel,)).float(),
        "zero": torch.zeros(numel),
        "few": torch.where(torch.rand(numel) < 0.001, torch.randn(numel), 0.0),
        "sorted": torch.arange(numel, dtype=torch.float32),
        "unsampled": torch.where(
            torch.arange(numel) % 100 == 0, 9.0, torch.randn(numel)
        ),  # all that is looked at is large
    }
    for name, values in cases.items():
        for k in {1, max(1, numel // 100), numel}:
            wanted = values.abs().sort(descending=True, stable=True).indices[:k]
            assert torch.equal(largest(values, k).sort().values, wanted.sort().values), (name, k)


def test_drawn_indices_are_distinct_seeded_and_uniform() -> None:
    for numel, k in ((1, 1), (10, 2), (10, 10), (5000, 50), (5000, 1000), (5000, 1300)):
        first, again, other = (draw_places(numel, k, torch.Generator().manual_seed(seed)) for seed in (3, 3, 4))
        assert len(first) == len(first.unique()) == k
        assert 0 <= first.min() <= first.max() < numel
        assert torch.equal(first, again)
        assert numel <= 10 or not torch.equal(first, other)
    generator, times = torch.Generator().manual_seed(1), torch.zeros(40)
    for _ in range(4000):
        times[draw_places(40, 4, generator)] += 1
    assert (times / 400 - 1).abs().max() < 0.2  # a deviation of 5 % each


def averages(group: dist.ProcessGroup, rounds: int) -> dict[str, float]:
    """The mean of many sums without feedback, divided by the dense sum: the slope of a regression."""
    values = torch.linspace(-1, 1, 50) * (1 + group.rank())
    dense, found = summed(group, values), {}
    for method in ("int8", "randomk", "topk"):
        compressor, total = MAKE[method](group, [Size([50])], False), torch.zeros(50, dtype=torch.float64)
        for _ in range(rounds):
            bucket = values.clone()
            compressor(bucket).wait()
            total += bucket
        found[method] = ((total / rounds) @ dense / (dense @ dense)).item()
    return found


def test_int8_and_randomk_are_unbiased_and_topk_is_not(ranks: Ranks) -> None:
    found = ranks(2, averages, 400)[0]
    assert found["int8"] == pytest.approx(1, abs=0.002)
    assert found["randomk"] == pytest.approx(1, abs=0.1)
    assert found["topk"] < 0.5


def sum_representable_gradients(group: dist.ProcessGroup) -> dict[str, float]:
    """The largest error or residual for gradients of integers, which every method can represent exactly."""
    gradient = torch.randint(-7, 8, (60,), generator=torch.Generator().manual_seed(group.rank())).double()
    gradient[0] = 127 // group.size()  # so that int8's scale is one
    makers = MAKE | {
        "topk": lambda group, shapes, on: TopK(group, 1.0, feedback=on),
        "randomk": lambda group, shapes, on: RandomK(group, 1.0, 5, feedback=on),
    }
    found = {}
    for method in ("fp16", "int8", "topk", "randomk"):
        compressor, bucket = makers[method](group, [Size([60])], True), gradient.clone()
        compressor(bucket).wait()
        assert compressor.residual is not None
        found[method] = torch.stack([bucket - summed(group, gradient), compressor.residual]).abs().max().item()
    return found


def test_representable_gradients_are_summed_exactly(ranks: Ranks) -> None:
    for found in ranks(3, sum_representable_gradients):
        assert max(found.values()) < 1e-12


def beyond_16_bits(group: dist.ProcessGroup) -> tuple[float, float]:
    """For a gradient twice as large as fp16 allows: the sent and the remaining part, each as a fraction of it."""
    gradient = torch.full((9,), 2 * torch.finfo(torch.float16).max / (group.size() + 1), dtype=torch.float64)
    compressor, bucket = Cast(group, feedback=True), gradient.clone()
    compressor(bucket).wait()
    assert compressor.residual is not None
    parts = (bucket / group.size() / gradient, compressor.residual / gradient)
    return max(parts[0].tolist()), max(parts[1].tolist())


def test_fp16_overflow_stays_in_the_residual(ranks: Ranks) -> None:
    for sent, left in ranks(3, beyond_16_bits):
        assert (sent, left) == pytest.approx((0.5, 0.5), abs=4 * 2.0**-11)  # the limit is rounded, and each sum


FRACTIONS = (0.125, 0.5, 0.75)


def rounded_up(group: dist.ProcessGroup) -> list[float]:
    """For each fraction above a code: the error of the number rounded up, in standard deviations of fair draws."""
    levels, found = 127 // group.size(), []
    codes = torch.arange(2000, dtype=torch.float64) % (2 * levels - 1) - levels + 1  # to L - 1
    for fraction in FRACTIONS:
        values = codes + fraction
        values[codes == levels - 1] = levels  # which makes the scale one
        fair = values != levels
        Quantised(group, rank_seed(1, group.rank()), feedback=False)(values).wait()
        ups = int((values - group.size() * codes)[fair].round().sum())
        found.append(sampling_errors(ups, group.size() * int(fair.sum()), fraction))
    return found


def test_int8_rounds_up_with_the_right_probability(ranks: Ranks) -> None:
    for found in ranks(2, rounded_up):
        assert max(found) < 6  # one in 10^9


def indices_of_steps(group: dist.ProcessGroup) -> list[list[int]]:
    compressor, found = RandomK(group, 0.1, 5, feedback=False), []
    for _ in range(4):
        bucket = torch.full((1000,), group.rank() + 1.0)
        compressor(bucket).wait()
        found.append(bucket.nonzero().flatten().tolist())
    return found


def test_random_indices_equal_on_ranks_and_change_per_step(ranks: Ranks) -> None:
    one, other = ranks(2, indices_of_steps)
    assert one == other
    assert [len(places) for places in one] == [100] * 4
    assert all(len(set(before) & set(after)) < 30 for before, after in itertools.pairwise(one))  # a fair draw: 10


def sixteen_bits(group: dist.ProcessGroup) -> dict[str, tuple[bool, bool]]:
    """Whether sums of bfloat16 gradients are bfloat16, and after 40 steps close to the dense sum with the residual."""
    found = {}
    for method, make in MAKE.items():
        compressor = make(group, BUCKETS[-1], True)
        numel = sum(shape.numel() for shape in BUCKETS[-1])
        total, dense = torch.zeros(numel), torch.zeros(numel, dtype=torch.float64)
        for step in range(40):
            bucket = KINDS["normal"](numel, step % 2).bfloat16()
            dense += summed(group, bucket)
            compressor(bucket).wait()
            total += bucket
        assert compressor.residual is not None
        near = (total + summed(group, compressor.residual) - dense).abs().max() < 0.05 * dense.abs().max()
        found[method] = (bucket.dtype == torch.bfloat16, bool(near))
    return found


def test_bfloat16_gradients_are_compressed(ranks: Ranks) -> None:
    for found in ranks(2, sixteen_bits):
        assert found == dict.fromkeys(MAKE, (True, True))


def through_buckets(group: dist.ProcessGroup) -> tuple[list[list[tuple[int, ...]]], bool]:
    """The shapes for which each bucket's all_reduce was created, and whether it summed the gradients."""
    seen: list[list[tuple[int, ...]]] = []

    def make_all_reduce(shapes: list[Size]) -> Compressor:
        seen.append([tuple(shape) for shape in shapes])
        return Cast(group, feedback=True)

    parameters = [nn.Parameter(torch.ones(shape)) for shape in ((4, 3), (3,), (2, 5))]
    buckets = GradientBuckets(parameters, group, 50, make_all_reduce=make_all_reduce)
    with buckets.accumulate(last=True):
        sum(parameter.sum() * (index + 1) for index, parameter in enumerate(parameters)).backward()  # type: ignore[union-attr]
    buckets.finish()
    right = all(
        torch.equal(view, torch.full_like(view, (index + 1) * group.size()))
        for index, view in enumerate(parameter.grad for parameter in parameters if parameter.grad is not None)
    )
    return seen, right


def test_each_bucket_has_its_own_compressor(ranks: Ranks) -> None:
    for seen, right in ranks(2, through_buckets):
        assert seen == [[(2, 5), (3,)], [(4, 3)]]
        assert right
