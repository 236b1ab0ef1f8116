"""Bytes, rates and stability of servers: against sums by hand, and against each other at their limits."""

import math

import pytest

from distlab.collectives.costs import all_reduce_bytes
from distlab.parameter_server.costs import (
    apart_rate,
    averaging_bytes,
    granted_rate,
    in_step_rate,
    largest_stable_rate,
    server_bytes,
)


def test_the_server_passes_all_and_a_ring_never_twice_the_tensor() -> None:
    for ranks in range(2, 65):
        sent = [server_bytes(ranks, 1000, rank) for rank in range(ranks)]
        assert (sent[0], set(sent[1:])) == (1000.0 * (ranks - 1), {1000.0})
        assert sum(sent) == all_reduce_bytes("server", ranks, 1000) + 1000 * (ranks - 1)
        assert averaging_bytes(ranks, 1000, 5) == pytest.approx(all_reduce_bytes("gloo", ranks, 1000) / 5)
    assert server_bytes(4, 1000, 0, local_steps=4) == 750.0


def test_the_slowest_decides_in_step_and_everyone_apart() -> None:
    samples, step_s = [4, 4, 4, 4], [1.0, 1.0, 1.0, 2.0]
    assert in_step_rate(samples, step_s) == 8.0
    assert apart_rate(samples, step_s) == 14.0


@pytest.mark.parametrize(("late", "bound"), [(0, 2.0), (1, 1.0), (2, 0.618034)])
def test_known_bounds_of_delayed_descent(late: int, bound: float) -> None:
    assert largest_stable_rate(late, 1.0) == pytest.approx(bound, rel=1e-6)
    assert largest_stable_rate(late, 4.0) == pytest.approx(bound / 4, rel=1e-6)
    assert largest_stable_rate(100, 1.0) == pytest.approx(math.pi / 201, rel=1e-3)


# Two workers of one sample a step, one of which takes 1 s and the other 3 s.
@pytest.mark.parametrize(
    ("budget", "most", "staleness", "rate"),
    [
        (4, 1, None, 4 / 3),  # steps end at 1, 2 and 3 s, and that of the straggler at 3 s: the sum of rates
        (4, 2, None, 4 / 6),  # two each, and the straggler's end at 6 s
        (5, 2, None, 5 / 6),  # one is left at 2 s
        (4, 1, 0, 4 / 6),  # two each, in step
        (4, 1, 1, 4 / 4),  # the fast waits from 2 s to 3 s, and takes the last
    ],
)
def test_what_the_rules_allow_is_counted_by_hand(budget: int, most: int, staleness: int | None, rate: float) -> None:
    assert granted_rate([1, 1], [1.0, 3.0], budget, most=most, staleness=staleness) == pytest.approx(rate)


def test_a_worker_weighs_as_much_as_its_samples() -> None:
    assert granted_rate([3, 1], [1.0, 3.0], 4) == pytest.approx(10 / 3)


@pytest.mark.parametrize(("share", "rate"), [(1.0, 1600), (0.25, 1000), (0.1, 800)])
def test_the_last_push_of_a_straggler_is_part_of_the_run(share: float, rate: float) -> None:
    """Four workers, 20 steps each of 10 ms, granted 4 at a time."""
    step_s = [0.01, 0.01, 0.01 / share, 0.01]
    assert granted_rate([4] * 4, step_s, 80, most=4) == pytest.approx(rate)
    assert granted_rate([4] * 4, step_s, 80_000, most=4) == pytest.approx(apart_rate([4] * 4, step_s), rel=0.01)


def test_a_bound_lies_between_the_two_and_comes_to_them_at_its_ends() -> None:
    samples, step_s = [4, 4, 4, 4], [1.0, 1.0, 1.0, 2.0]
    rates = [granted_rate(samples, step_s, 400, staleness=staleness) for staleness in (0, 4, 64, 400)]
    assert rates == sorted(rates)
    assert rates[0] == pytest.approx(in_step_rate(samples, step_s))
    assert rates[-1] == granted_rate(samples, step_s, 400) == pytest.approx(apart_rate(samples, step_s), rel=0.02)
