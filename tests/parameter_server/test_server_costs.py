"""Bytes, rates and stability of servers: against sums by hand, and against each other at their limits."""

import math

import pytest

from distlab.collectives.costs import all_reduce_bytes
from distlab.parameter_server.costs import apart_rate, averaging_bytes, in_step_rate, largest_stable_rate, server_bytes


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
