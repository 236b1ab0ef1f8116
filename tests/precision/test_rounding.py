"""Rounding to 16 bits: neighbours alone, right in the mean, and what a unit in the last place is."""

import math

import pytest
import torch

from distlab.precision import stochastic_bf16, ulp


def drawn(value: float, count: int = 20_000) -> torch.Tensor:
    return stochastic_bf16(torch.full((count,), value), torch.Generator().manual_seed(2)).double()


@pytest.mark.parametrize(("value", "share"), [(1 + 2**-9, 0.25), (-(1 + 2**-8), 0.5), (3 + 2**-6 * 0.9, 0.9)])
def test_up_or_down_by_the_share_of_the_way(value: float, share: float) -> None:
    values = drawn(value)
    unit = ulp(torch.tensor(value), torch.bfloat16).item()
    low = math.floor(abs(value) / unit) * unit
    assert set(values.abs().unique().tolist()) == {low, low + unit}
    assert ((values.abs() > low).double().mean().item()) == pytest.approx(share, abs=0.02)
    # To the nearest it would be off by a share of a unit.
    assert values.mean().item() == pytest.approx(value, abs=0.02 * unit)


def test_what_bf16_holds_and_what_is_no_number_stays() -> None:
    values = torch.tensor([0.0, -0.0, 1.0, -1.5, 2.0**-126, math.inf, -math.inf, math.nan])
    found = stochastic_bf16(values, torch.Generator().manual_seed(1)).float()
    assert torch.equal(found.nan_to_num(7), values.nan_to_num(7))
    assert found.isinf().sum() == 2 and found.isnan().sum() == 1


def test_the_same_seed_draws_the_same() -> None:
    values = torch.rand(1000)
    one, same, other = (stochastic_bf16(values, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_units_in_the_last_place(dtype: torch.dtype) -> None:
    limits = torch.finfo(dtype)
    values = torch.tensor([1.0, 1.9, -2.0, 0.75, 0.0, limits.smallest_normal / 4], dtype=torch.float64)
    wanted = [limits.eps * factor for factor in (1, 1, 2, 0.5)] + [limits.smallest_normal * limits.eps] * 2
    assert ulp(values, dtype).tolist() == wanted
