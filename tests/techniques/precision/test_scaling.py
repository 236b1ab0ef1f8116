"""The loss scale compared with torch.amp.GradScaler, step by step."""

import random

import pytest
import torch

from distlab.techniques.precision import LossScale, all_finite

INTERVAL = 3


def scales_of_torch(overflows: list[bool], start: float) -> list[float]:
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=start, growth_interval=INTERVAL)
    scales = []
    for overflow in overflows:
        optimizer.zero_grad()
        scaler.scale((weight * (float("inf") if overflow else 1e-30)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


@pytest.mark.parametrize("start", [65536.0, 2.0**126])
def test_scale_equals_torchs_grad_scaler(start: float) -> None:
    draw = random.Random(4)
    overflows = [draw.random() < 0.2 for _ in range(60)]
    assert True in overflows[:20] and False in overflows
    ours, scales = LossScale(start, interval=INTERVAL), []
    for overflow in overflows:
        ours.adjust(overflowed=overflow)
        scales.append(ours.value)
    assert scales == scales_of_torch(overflows, start)
    assert len(set(scales)) > 3


def test_scale_stays_within_float32() -> None:
    quiet = [False] * 9
    ours = LossScale(2.0**126, interval=INTERVAL)
    for overflow in quiet:
        ours.adjust(overflowed=overflow)
    assert ours.value == scales_of_torch(quiet, 2.0**126)[-1] == 2.0**127


def test_defaults_equal_torchs() -> None:
    ours, theirs = LossScale(), torch.amp.GradScaler("cpu")
    assert ours.value == theirs.get_scale() == 65536
    assert (ours.growth, ours.backoff, ours.interval) == (
        theirs.get_growth_factor(), theirs.get_backoff_factor(), theirs.get_growth_interval(),
    )  # fmt: skip


@pytest.mark.parametrize("bad", ["inf", "-inf", "nan"])
def test_one_non_finite_element_is_detected(bad: str) -> None:
    assert all_finite([torch.ones(3), torch.zeros(2)])
    assert not all_finite([torch.ones(3), torch.tensor([0.0, float(bad)])])
