"""Learning rates scaled with the batch size."""

import math

import pytest

import distlab.techniques.large_batch as optimizers


@pytest.mark.parametrize("k", [1, 2, 8, 32])
def test_scaling_factors(k: int) -> None:
    assert optimizers.unscaled(k) == 1
    assert optimizers.sqrt(k) == math.sqrt(k)
    assert optimizers.linear(k) == k


def test_warmup_starts_at_the_base_rate() -> None:
    found = [optimizers.warmup(8, step, 4) for step in range(7)]
    assert found == [1, 2.75, 4.5, 6.25, 8, 8, 8]  # the lesson's starts at 8/4 and does not say how it goes on
    assert optimizers.warmup(8, 0, 0) == 8
    assert {optimizers.warmup(1, step, 4) for step in range(9)} == {1.0}


def test_every_group_keeps_its_own_base_rate() -> None:
    groups = [{"lr": 0.1}, {"lr": 0.02}]
    for factor in (4.0, 2.0):
        optimizers.set_rates(groups, factor)
        assert [group["lr"] for group in groups] == [0.1 * factor, 0.02 * factor]


def test_the_lessons_exercise_of_four_accumulated_steps() -> None:
    assert 20 / 4 == 5  # four microbatches that sum to 20
    assert optimizers.linear(4) * 0.1 == pytest.approx(0.4)
