"""Master weights: small updates add up in float32, but not in 16 bits."""

import pytest
import torch
from torch import nn

from distlab.lab.workload.optimizer import PlainSGD
from distlab.techniques.precision import Masters

SCALE, STEPS = 1024.0, 64


def after(persistent: bool) -> tuple[float, Masters]:
    """A weight of 1 in bf16 after 64 steps of 2^-10 each; the next larger bf16 number is 2^-7 away."""
    weight = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    masters = Masters([weight], [torch.ones(1)], persistent=persistent)
    optimizer = PlainSGD(masters.parameters, lr=1.0)
    for _ in range(STEPS):
        weight.grad = torch.full((1,), -SCALE / 1024, dtype=torch.bfloat16)
        masters.deliver(SCALE)
        assert masters.parameters[0].grad is not None and masters.parameters[0].grad.item() == -1 / 1024
        optimizer.step()
        masters.refresh()
    return weight.item(), masters


@pytest.mark.parametrize("persistent", [True, False])
def test_small_updates_need_persistent_masters(persistent: bool) -> None:
    value, masters = after(persistent)
    assert value == (1 + STEPS / 1024 if persistent else 1.0)
    assert masters.parameters[0].numel() == persistent  # a temporary copy is freed after its update
    assert masters.parameters[0].grad is None


def test_unscaling_in_float32_avoids_underflow() -> None:
    gradient = torch.tensor([1e-8 * 65536], dtype=torch.float16)
    weight = nn.Parameter(torch.ones(1, dtype=torch.float16))
    weight.grad = gradient
    masters = Masters([weight], [torch.ones(1)], persistent=True)
    masters.deliver(65536)
    assert masters.parameters[0].grad is not None
    assert masters.parameters[0].grad.item() == pytest.approx(1e-8, rel=1e-3)
    assert (gradient / 65536).item() == 0
