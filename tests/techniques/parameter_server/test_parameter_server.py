"""The rules of the parameter server without processes: when workers may start, and which updates count."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from distlab.techniques.parameter_server.server import LEAVE, PUSH, START, Event, Ordered, ParameterServer, draw_order

ONE = torch.ones(2)


def server_of(workers: int, budget: int = 100, staleness: int | None = None) -> ParameterServer:
    return ParameterServer(torch.zeros(2), range(workers), lr=0.5, budget=budget, staleness=staleness)


def step(server: ParameterServer, worker: int, number: int) -> None:
    assert server.start(worker) == 1
    server.push(worker, number, ONE)


def test_a_worker_too_far_ahead_waits_for_the_slowest() -> None:
    server = server_of(3, staleness=2)
    step(server, 0, 1)
    step(server, 0, 2)
    assert server.may_start(0), "two steps ahead of two that have finished none"
    step(server, 0, 3)
    assert not server.may_start(0) and server.may_start(1)
    step(server, 1, 1)
    assert not server.may_start(0) and server.behind() == [2]
    step(server, 2, 1)
    assert server.may_start(0)
    assert server.weights.tolist() == [-2.5, -2.5]


def test_staleness_0_is_lockstep_and_none_is_unbounded() -> None:
    lockstep, unbounded = server_of(2, staleness=0), server_of(2)
    for server in (lockstep, unbounded):
        step(server, 0, 1)
    assert not lockstep.may_start(0) and unbounded.may_start(0)
    step(lockstep, 1, 1)
    assert lockstep.may_start(0) and lockstep.may_start(1)


def test_a_worker_that_leaves_blocks_nobody_and_loses_its_steps() -> None:
    server = server_of(3, budget=5, staleness=0)
    step(server, 0, 1)
    step(server, 1, 1)
    assert server.start(2) == 1 and not server.may_start(0)
    server.leave(2)
    server.leave(2)
    assert server.may_start(0) and server.history[-1] == Event(LEAVE, 2, 1)
    with pytest.raises(ValueError, match="rank 2 has left"):
        server.push(2, 1, ONE)
    step(server, 0, 2)
    step(server, 1, 2)
    assert server.spent and server.may_finish() and server.weights.tolist() == [-2.0, -2.0]


def test_every_update_counts_once_or_is_an_error() -> None:
    server = server_of(2)
    step(server, 0, 1)
    with pytest.raises(ValueError, match="rank 0 pushes update 1 after 1"):
        step(server, 0, 1)
    with pytest.raises(ValueError, match="rank 0 starts again"):
        server.start(0)
    with pytest.raises(ValueError, match="rank 0 pushes update 3 after 1"):
        server.push(0, 3, ONE)
    with pytest.raises(ValueError, match="rank 1 pushes update 1 after 0"):
        server.push(1, 1, ONE)  # it never started
    assert server.weights.tolist() == [-0.5, -0.5]


def test_the_budget_ends_the_run_once_no_step_is_under_way() -> None:
    server = server_of(2, budget=5)
    assert server.start(0, most=4) == 4 and not server.may_finish()
    assert server.start(1, most=4) == 1 and server.spent
    server.push(0, 1, ONE)
    assert server.start(0) == 0 and not server.may_finish() and server.behind() == [1]
    server.push(1, 1, ONE)
    assert server.may_finish() and server.clocks == {0: 4, 1: 1}


@given(st.integers(1, 6), st.integers(0, 3), st.integers(1, 30), st.integers(0, 100))
def test_any_allowed_order_keeps_the_bound_and_uses_the_budget(
    workers: int, staleness: int, budget: int, seed: int
) -> None:
    server = server_of(workers, budget, staleness)
    order = draw_order(seed, server)
    clocks, finished = dict.fromkeys(range(workers), 0), 0
    for event in server.history:
        assert event.kind == PUSH or clocks[event.worker] - min(clocks.values()) <= staleness
        clocks[event.worker] += event.steps * (event.kind == PUSH)
        finished += event.kind == PUSH
    assert sum(clocks.values()) == finished == budget
    assert order == draw_order(seed, server_of(workers, budget, staleness))
    assert sum(kind == PUSH for kind, _ in order) == budget


def test_a_fixed_order_is_kept() -> None:
    order = [(START, 1), (START, 0), (PUSH, 0), (PUSH, 1)]
    server = Ordered(order, torch.zeros(2), range(2), lr=1.0, budget=2)
    assert not server.may_start(0)
    server.start(1)
    assert server.may_start(0) and not server.may_push(1)
    server.start(0)
    assert server.may_start(1), "no steps are left, which may be answered at any time"
    assert server.may_push(0) and not server.may_push(1)
    server.push(0, 1, ONE)
    server.push(1, 1, ONE)
    assert [(event.kind, event.worker) for event in server.history] == order
    assert server.start(1) == 0
