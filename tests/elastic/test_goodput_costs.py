"""Goodput and the best interval: against failures that a seed draws one by one, and against what the papers print."""

import math
import random

import pytest

from benchmarks.useful import daly_s, goodput, young_s

pytestmark = pytest.mark.timeout(60)


def simulated(interval: float, checkpoint: float, restart: float, between: float, segments: int) -> float:
    """The share of the time that stands of a training that goes through `segments`, failure by failure."""
    draw = random.Random(7)
    failure = draw.expovariate(1 / between)
    now = 0.0
    for _ in range(segments):
        ahead = interval + checkpoint
        while failure < now + ahead:
            now = failure  # all since the last checkpoint is lost
            failure += draw.expovariate(1 / between)
            while failure < now + restart:
                now, failure = failure, failure + draw.expovariate(1 / between)
            now += restart
        now += ahead
    return segments * interval / now


@pytest.mark.parametrize(
    ("interval", "checkpoint", "restart", "between"),
    [(1.0, 0.1, 0.5, 10.0), (5.0, 0.1, 0.5, 10.0), (20.0, 1.0, 0.0, 10.0), (0.3, 0.2, 3.0, 4.0)],
)
def test_failures_drawn_one_by_one_leave_what_the_formula_says(
    interval: float, checkpoint: float, restart: float, between: float
) -> None:
    found = simulated(interval, checkpoint, restart, between, segments=60_000)
    assert goodput(interval, checkpoint, restart, between) == pytest.approx(found, rel=0.03)


@pytest.mark.parametrize(("between_hours", "minutes", "digits"), [(24, 117, 0), (6, 57, 0), (0.25, 9.1, 1)])
def test_the_intervals_that_daly_prints(between_hours: float, minutes: float, digits: int) -> None:
    """Figures 3, 4 and 5: a dump takes 5 minutes."""
    assert round(daly_s(300, 3600 * between_hours) / 60, digits) == minutes


@pytest.mark.parametrize(("checkpoint", "between"), [(0.003, 2.0), (0.1, 2.0), (1.0, 2.0), (5.0, 2.0)])
def test_no_interval_is_better_than_the_best_one(checkpoint: float, between: float) -> None:
    """Of a fine grid; Young's is as good while a checkpoint is short beside the time between failures."""
    grid = [between * 1.02**step for step in range(-400, 300)]
    most = max(goodput(each, checkpoint, 0.3, between) for each in grid)
    assert goodput(daly_s(checkpoint, between), checkpoint, 0.3, between) > 0.98 * most
    if checkpoint <= 0.1:
        assert goodput(daly_s(checkpoint, between), checkpoint, 0.3, between) > 0.9999 * most
        assert goodput(young_s(checkpoint, between), checkpoint, 0.3, between) > 0.998 * most


def test_without_failures_only_checkpoints_cost_and_without_checkpoints_only_failures() -> None:
    assert goodput(9.0, 1.0, 5.0, 1e9) == pytest.approx(0.9)
    assert goodput(1e-9, 0.0, 2.0, 10.0) == pytest.approx(math.exp(-0.2))
    assert goodput(1e6, 1.0, 1.0, 1.0) == 0.0
    assert daly_s(4.0, 2.0) == 2.0
