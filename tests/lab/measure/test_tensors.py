"""Comparisons of tensors fail for every kind of wrong result."""

import hashlib
import math
import struct
import zlib

import pytest
import torch

from distlab.lab.measure.tensors import (
    Difference,
    Worst,
    difference,
    differences,
    digest_of,
    distance,
    factor,
    hash_of,
    larger,
    largest,
    largest_difference,
    relative_norm,
)

DENSE = {"w": torch.tensor([[1.0, 2.0]]), "b": torch.tensor([3.0])}


def test_the_largest_difference_counts() -> None:
    assert difference(DENSE.items(), DENSE) == 0.0
    found = {"w": torch.tensor([[1.0, 2.5]]), "b": torch.tensor([3.25])}
    assert difference(found.items(), DENSE) == 0.5


@pytest.mark.parametrize(
    "found",
    [
        {"w": DENSE["w"]},
        DENSE | {"extra": torch.zeros(1)},
        DENSE | {"w": torch.tensor([1.0, 2.0])},
        DENSE | {"b": torch.tensor([math.nan])},
        DENSE | {"extra": torch.zeros(0)},
        DENSE | {"w": torch.zeros(0)},
        DENSE | {"w": torch.tensor([[1.0], [2.0]])},
        {},
    ],
    ids=[
        "missing", "unknown", "another shape", "not a number", "unknown and empty", "empty", "another order of axes",
        "nothing at all",
    ],
)  # fmt: skip
def test_an_impossible_comparison_is_infinite(found: dict[str, torch.Tensor]) -> None:
    assert difference(found.items(), DENSE) == math.inf


def test_a_rank_without_the_dense_run_consumes_the_collective() -> None:
    consumed = []
    assert difference(((name, consumed.append(name) or tensor) for name, tensor in DENSE.items()), None) == 0.0  # type: ignore[func-returns-value]
    assert consumed == ["w", "b"]


def test_not_a_number_is_the_largest() -> None:
    assert larger(1.0, 2.0) == 2.0
    assert larger(math.nan, 2.0) == larger(2.0, math.nan) == math.inf


@pytest.mark.parametrize(
    ("each", "wanted"),
    [
        (Difference(1.0, 2.0), 0.5), (Difference(0.0, 0.0), 0.0), (Difference(1e-30, 0.0), math.inf), (Difference(math.nan, 1.0), math.inf),
        (Difference(math.inf, math.inf), math.inf),
    ],
)  # fmt: skip
def test_the_share_of_the_tolerance(each: Difference, wanted: float) -> None:
    assert each.share == wanted


def test_the_worst_has_the_largest_share_of_its_tolerance() -> None:
    worst = Worst()
    for step, (value, bound) in enumerate([(0.0, 0.0), (0.25, 0.25), (0.5, 1.0)]):
        worst.note("losses", value, bound, f"step {step}")
    assert worst.found == {"losses": Difference(0.25, 0.25, "step 1")}
    worst.note("losses", math.nan, 9.0, "step 3")
    assert worst.found == {"losses": Difference(math.inf, 9.0, "step 3")}
    assert worst.times == {"losses": 4}


def test_with_zero_tolerance_the_largest_difference_is_the_worst() -> None:
    worst = Worst(["weights", "gradients"])
    for value in (1e-9, 2.0, 1.0):
        worst.note("weights", value)
    assert worst.found == {"weights": Difference(2.0), "gradients": Difference(0.0)}
    assert worst.times["gradients"] == 0


def test_named_tensors_are_one_comparison_with_the_worst_name() -> None:
    worst = Worst()
    worst.compare("weights", (DENSE | {"b": torch.tensor([3.5])}).items(), DENSE, 0.1, "step 2")
    worst.compare("weights", DENSE.items(), None, 0.1, "step 3")
    assert worst.found == {"weights": Difference(0.5, 0.1, "step 2, b")}
    assert worst.times == {"weights": 1}
    assert dict(differences([("w", DENSE["w"])], DENSE)) == {"w": 0.0, "b": math.inf}


def test_a_difference_of_two_tensors_its_largest_and_its_norm() -> None:
    one, other = torch.tensor([3.0, 4.0]), torch.zeros(2, dtype=torch.bfloat16)
    assert (
        largest_difference(one, one + 1),
        largest_difference(one, one[:1]),
        largest_difference(one, one * math.nan),
    ) == (1.0, math.inf, math.inf)
    assert (largest(-one), largest(torch.empty(0)), largest(one / 0)) == (4.0, 0.0, math.inf)
    assert distance(one, other) == relative_norm(one, torch.tensor(1.0)) == 5.0
    assert relative_norm(one / 0, torch.tensor(1.0)) == math.inf and relative_norm(one * 0, torch.tensor(0.0)) == 0.0


W = [6.0, 8.0]  # of norm 10; [-0.8, 0.6] is orthogonal to it and has norm 1


def beside(times: float, off: float) -> list[float]:
    """Return a multiple of W plus an orthogonal vector of norm `off`."""
    return [6.0 * times - 0.8 * off, 8.0 * times + 0.6 * off]


@pytest.mark.parametrize(
    ("found", "wanted", "times"),
    [
        (beside(3.0, 0.0), W, 3.0), (beside(-0.25, 0.0), W, -0.25), ([0.0, 0.0], W, 0.0), (W, [0.0, 0.0], None),
        ([0.6, 0.8], [0.6, 0.8], 1.0), ([3.0, 3.0], [0.0, 0.0], None),
        # The remainder may be 1e-6 of the longer vector.
        (beside(1.0, 0.9e-5), W, 1.0), (beside(1.0, 1.1e-5), W, None),
        (beside(100.0, 0.9e-3), W, 100.0), (beside(100.0, 1.1e-3), W, None),
        (beside(0.0, 0.9e-5), W, 0.0), (beside(0.0, 1.1e-5), W, None),
        ([math.inf, 8.0], W, None), ([math.nan, 8.0], W, None), ([math.inf, math.inf], W, None),
    ],
)  # fmt: skip
def test_a_multiple_up_to_rounding(found: list[float], wanted: list[float], times: float | None) -> None:
    seen = factor(torch.tensor(found, dtype=torch.float64), torch.tensor(wanted, dtype=torch.float64))
    assert seen == (None if times is None else pytest.approx(times, abs=1e-9))


def test_no_tensors_and_none_expected_are_equal() -> None:
    worst = Worst()
    worst.compare("optimizer", [], {}, 0.5, "step 4")
    assert (worst.found, worst.times) == ({"optimizer": Difference(0.0, 0.5, "step 4")}, {"optimizer": 1})


def test_a_norm_is_computed_in_float64() -> None:
    one, other = torch.tensor([1.0, 1.0]), torch.tensor([1.0, 1.0 + 1e-9], dtype=torch.float64)
    assert distance(one, other) == pytest.approx(1e-9, rel=1e-6)
    assert distance(torch.tensor([3e30, 4e30]), torch.zeros(2)) == pytest.approx(5e30)


# The hash of a tensor's bytes: CRC-32, which shows every bit that flips.

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", [0, 5, 1 << 16])
def test_a_hash_is_crc_32_of_all_bytes(dtype: torch.dtype, length: int) -> None:
    tensor = torch.randn(length, generator=torch.Generator().manual_seed(1)).to(dtype)
    assert hash_of(tensor) == zlib.crc32(bytes(tensor.view(torch.uint8).tolist()))


def test_a_digest_is_sha256_of_all_bytes_in_order() -> None:
    tensors = [torch.tensor([1.0, 2.0]), torch.tensor([7], dtype=torch.int64), torch.ones(2, 3).t()]
    stored = struct.pack("<2f", 1.0, 2.0) + struct.pack("<q", 7) + struct.pack("<6f", *[1.0] * 6)
    assert digest_of(tensors) == hashlib.sha256(stored).hexdigest()


def test_equal_bytes_have_equal_hashes_in_any_layout() -> None:
    flat = torch.randn(101, generator=torch.Generator().manual_seed(2))
    view = flat[1:100]  # begins in the middle of a word
    assert hash_of(view) == hash_of(view.clone())
    assert hash_of(flat[::2]) == hash_of(flat[::2].clone())
    assert hash_of(torch.ones(3, 5).t()) == hash_of(torch.ones(5, 3))


def test_equal_numbers_may_have_different_bits() -> None:
    assert hash_of(torch.tensor([0.0])) != hash_of(torch.tensor([-0.0]))


def test_a_tensor_can_be_resized_after_hashing() -> None:
    tensor = torch.ones(3, requires_grad=True)
    assert hash_of(tensor) == hash_of(tensor.detach().clone())
    assert tensor.untyped_storage().resizable()


def test_a_tensor_whose_memory_is_freed_has_no_bytes() -> None:
    freed = torch.ones(4)
    freed.untyped_storage().resize_(0)
    assert hash_of(freed) == hash_of(torch.empty(0))
