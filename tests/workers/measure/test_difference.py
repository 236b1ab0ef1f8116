"""The comparison with one process can fail in every way that a wrong result can be wrong."""

import math

import pytest
import torch

from workers.measure.difference import difference, larger

DENSE = {"w": torch.tensor([[1.0, 2.0]]), "b": torch.tensor([3.0])}


def test_equal_tensors_do_not_differ() -> None:
    assert difference(DENSE.items(), DENSE) == 0.0


def test_the_largest_difference_counts() -> None:
    found = {"w": torch.tensor([[1.0, 2.5]]), "b": torch.tensor([3.25])}
    assert difference(found.items(), DENSE) == 0.5


@pytest.mark.parametrize(
    "found",
    [
        {"w": DENSE["w"]},
        DENSE | {"extra": torch.zeros(1)},
        DENSE | {"w": torch.tensor([1.0, 2.0])},
        DENSE | {"b": torch.tensor([math.nan])},
        {},
    ],
    ids=["missing", "unknown", "another shape", "not a number", "nothing at all"],
)
def test_what_cannot_be_compared_differs_without_end(found: dict[str, torch.Tensor]) -> None:
    assert difference(found.items(), DENSE) == math.inf


def test_a_rank_without_the_dense_run_takes_part_all_the_same() -> None:
    taken = []
    assert difference(((name, taken.append(name) or tensor) for name, tensor in DENSE.items()), None) == 0.0  # type: ignore[func-returns-value]
    assert taken == ["w", "b"]


def test_not_a_number_is_the_largest() -> None:
    assert larger(1.0, 2.0) == 2.0
    assert larger(math.nan, 2.0) == larger(2.0, math.nan) == math.inf
