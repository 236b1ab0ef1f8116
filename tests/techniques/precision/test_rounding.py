"""The size of a unit in the last place."""

import pytest
import torch

from distlab.techniques.precision import ulp


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_units_in_the_last_place(dtype: torch.dtype) -> None:
    limits = torch.finfo(dtype)
    values = torch.tensor([1.0, 1.9, -2.0, 0.75, 0.0, limits.smallest_normal / 4], dtype=torch.float64)
    wanted = [limits.eps * factor for factor in (1, 1, 2, 0.5)] + [limits.smallest_normal * limits.eps] * 2
    assert ulp(values, dtype).tolist() == wanted
