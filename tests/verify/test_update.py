"""An update by its formula, held against torch's optimizers, and what each wrong line of one is off by."""

import math

import pytest
import torch
from torch import Tensor, nn

from distlab.config import Config
from distlab.measure.tensors import Off
from distlab.verify.reference_run import adamw, sgd, stored_difference

SIZE, STEPS = 301, 5
TYPES = (torch.float64, torch.float32, torch.bfloat16)


def config_of(**settings: str) -> Config:
    return Config.read({"LAB_LR": "0.05"} | settings)


def drawn(dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(seed)).to(dtype)


def trained(dtype: torch.dtype, **options: float) -> tuple[dict[str, Tensor], dict[str, Tensor], list[Tensor]]:
    """torch's AdamW after `STEPS` updates: its state before the last one and after, and weights, gradient, result."""
    weight = nn.Parameter(drawn(dtype, 0))
    optimizer = torch.optim.AdamW([weight], **({"lr": 0.05} | options))  # type: ignore[arg-type]
    for step in range(STEPS):
        weight.grad = drawn(dtype, step + 1)
        before = {name: value.clone() for name, value in optimizer.state[weight].items()}
        stood = weight.detach().clone()
        optimizer.step()
    after = {name: value.clone() for name, value in optimizer.state[weight].items()}
    return before, after, [stood, drawn(dtype, STEPS), weight.detach().clone()]


def adamw_shares(dtype: torch.dtype, **options: float) -> dict[str, float]:
    before, after, (weight, gradient, found) = trained(dtype, **options)
    held = adamw(weight, gradient, before, found, after, STEPS - 1, 0.0, config_of(LAB_OPTIMIZER="adamw"))
    return {name: each.share for name, each in held.items()}


@pytest.mark.parametrize("dtype", TYPES)
def test_torchs_sgd_is_within_what_rounding_allows_and_another_rate_is_not(dtype: torch.dtype) -> None:
    weight, gradient = drawn(dtype, 0), drawn(dtype, 1)
    stepped = nn.Parameter(weight.clone())
    stepped.grad = gradient.clone()
    for rate, holds in ((0.05, True), (0.1, False), (0.0, False)):
        stepped.data.copy_(weight)
        torch.optim.SGD([stepped], lr=rate).step()
        assert (sgd(weight, gradient, stepped.detach(), 0.0, config_of())["weights"].share <= 1) == holds


@pytest.mark.parametrize("dtype", TYPES)
def test_torchs_adamw_is_within_what_rounding_allows(dtype: torch.dtype) -> None:
    assert max(adamw_shares(dtype).values()) <= 1


@pytest.mark.parametrize("options", [{"lr": 0.1}, {"weight_decay": 0.0}, {"eps": 1e-3}], ids=str)
def test_another_rate_no_decay_or_another_epsilon_is_off_in_the_weights(options: dict[str, float]) -> None:
    shares = adamw_shares(torch.float32, **options)
    assert shares["weights"] > 10
    assert shares["optimizer"] <= 1


def test_moments_of_another_gradient_and_an_optimizer_made_anew_are_seen() -> None:
    before, after, (weight, gradient, found) = trained(torch.float32)
    config = config_of(LAB_OPTIMIZER="adamw")
    other = adamw(weight, gradient * 2, before, found, after, STEPS - 1, 0.0, config)
    assert other["optimizer"].share > 10
    assert adamw(weight, gradient, {}, found, after, STEPS - 1, 0.0, config) == {"optimizer": Off(math.inf, 0.0)}
    lacking = {name: value for name, value in after.items() if name != "exp_avg_sq"}
    assert adamw(weight, gradient, before, found, lacking, STEPS - 1, 0.0, config) == {"optimizer": Off(math.inf, 0.0)}


def test_another_shape_or_type_is_infinitely_off() -> None:
    wanted = drawn(torch.float32, 0)
    assert stored_difference(wanted[1:], wanted, 1.0).value == math.inf
    assert stored_difference(wanted.double(), wanted, 1.0).value == math.inf
