"""The checks of asynchronous workers and their server, with one fault each and all workers in this process.

Each fault is one wrong line; the run with it is the control of the check that must fail.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from distlab.experiments.server import MODE
from distlab.experiments.server import run as run_server
from distlab.experiments.server.asynchronous import Report, count_wrong_starts, count_wrong_updates
from distlab.experiments.server.bugs import Forgetful, IgnoresFetch, OneShard, PushesNTimes
from distlab.experiments.server.checks import Replay, Workers, audit, differences, misordered
from distlab.lab.config import Config
from distlab.lab.report.reading import from_line
from distlab.lab.report.verdict import judge
from distlab.lab.workload.data import Batches
from distlab.lab.workload.model import build_model
from distlab.techniques.parameter_server.server import (
    PUSH,
    START,
    Client,
    Event,
    ParameterServer,
    Recorder,
    Worker,
    draw_order,
)
from tests.labs import TINY, failed, one_rank
from tests.warm_ranks import Ranks

WORKERS, MOST, LR, BUDGET = 3, 2, 0.01, 24
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Use one thread: the tensors are so small that a second thread would only take a core."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def config_of(**settings: str) -> Config:
    small = {"RUN_MODE": "server", "LAB_DEPTH": "1", "WORLD_SIZE": str(WORKERS), "LAB_BATCH": "7"}
    return Config.read(TINY | small | settings)


class Run:
    """Workers that train with a server in a drawn order, and the replay in one process that they are compared with."""

    def __init__(
        self, kind: type[Worker] = Worker, rules: type[ParameterServer] = ParameterServer, rate: float = 1.0,
        **settings: str,
    ) -> None:  # fmt: skip
        config = config_of(**settings)
        batches = Batches(config, proof=True, device=CPU, dtype=torch.float64)
        one = Workers(build_model(config, 1).double(), config, batches)
        self.workers = [kind(build_model(config, 1).double(), config, batches, r, LR) for r in range(WORKERS)]
        start = self.workers[0].vectors.weights
        self.replay = Replay(one, start, WORKERS)
        self.rules = rules(start.clone(), range(WORKERS), lr=LR * rate, budget=BUDGET)
        self.order = draw_order(1, ParameterServer(torch.zeros(1), range(WORKERS), lr=0.0, budget=BUDGET), MOST)
        self.follow(self.order)

    def follow(self, order: list[tuple[str, int]]) -> None:
        in_flight: dict[int, tuple[Tensor, float]] = {}
        for kind, rank in order:
            worker = self.workers[rank]
            if kind == START:
                granted = worker.fetch(cast(Client, self), MOST)
                self.replay.started(rank, granted)
                update = torch.zeros_like(worker.vectors.weights)
                in_flight[rank] = update, worker.accumulate(update, granted)
            else:
                update, loss = in_flight.pop(rank)
                number = len(worker.samples)
                self.rules.push(rank, number, update)
                self.replay.pushed(rank, number, update, loss)

    def start(self, most: int, weights: Tensor) -> int:
        """Grant steps to the next worker of the order."""
        rank = [rank for kind, rank in self.order if kind == START][len(self.rules.history) - self.pushes]
        weights.copy_(self.rules.weights)
        return self.rules.start(rank, most)

    @property
    def pushes(self) -> int:
        return sum(event.kind == PUSH for event in self.rules.history)

    def failed_checks(self) -> set[str]:
        """Return the checks that would fail."""
        differing = differences(self.replay, self.rules.weights, [worker.samples for worker in self.workers])
        differing["order of events"] = misordered(self.replay.seen, self.order, WORKERS, staleness=None)
        return {name for name, value in differing.items() if value > 1e-12}


class WeighedTwice(Worker):
    """A worker that applies a loss weight twice: to the loss, and to its gradient."""

    def backward(self) -> float:
        loss = super().backward()
        self.vectors.gradients *= self.batches.share(1, 1) * 100
        return loss


class FirstBatch(Worker):
    """A worker that always trains on the first batch."""

    def backward(self) -> float:
        steps, self.steps = self.steps, 0
        loss = super().backward()
        self.steps = steps
        return loss


class Uncleared(Worker):
    """A worker that adds the gradients of the previous step."""

    def backward(self) -> float:
        before = self.vectors.gradients.clone()
        loss = super().backward()
        self.vectors.gradients += before
        return loss


class NoLocalSteps(Worker):
    """A worker without local steps: all gradients of a push are taken at the fetched weights."""

    def accumulate(self, update: Tensor, steps: int) -> float:
        rate, self.lr = self.lr, 0.0
        loss = super().accumulate(update, steps)
        self.lr = rate
        return loss


class Sums(Worker):
    """A worker that reports the sum of losses as their mean."""

    def accumulate(self, update: Tensor, steps: int) -> float:
        return super().accumulate(update, steps) * steps


class AppliesTwice(ParameterServer):
    """A server that applies worker 1's second update twice."""

    def push(self, worker: int, number: int, update: Tensor) -> None:
        super().push(worker, number, update)
        if (worker, number) == (1, 2):
            self.weights.add_(update, alpha=-self.lr)


class HalvesUpdates(ParameterServer):
    """A server that halves each update."""

    def push(self, worker: int, number: int, update: Tensor) -> None:
        super().push(worker, number, update.mul_(0.5))


IN_THE_PUSH = {"gradients", "weights"}
IN_THE_SERVER = {"gradients", "losses", "weights"}


@pytest.mark.parametrize("model", ["line", "mlp", "gpt"])
def test_a_correct_run_passes_every_check(model: str) -> None:
    assert Run(LAB_MODEL=model).failed_checks() == set()
    assert Run(LAB_MODEL=model, LAB_MICROBATCHES="2").failed_checks() == set()


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (WeighedTwice, IN_THE_PUSH),
        (PushesNTimes, IN_THE_PUSH),
        (Uncleared, IN_THE_PUSH),
        (NoLocalSteps, IN_THE_PUSH),
        (OneShard, IN_THE_PUSH | {"samples", "losses"}),
        (FirstBatch, IN_THE_PUSH | {"samples", "losses"}),
        (IgnoresFetch, IN_THE_PUSH | {"losses"}),
        (Sums, {"losses"}),
    ],
)
def test_a_wrong_worker_fails_its_checks(kind: type[Worker], expected: set[str]) -> None:
    assert expected <= Run(kind).failed_checks()


@pytest.mark.parametrize(
    ("rules", "rate"), [(Forgetful, 1.0), (AppliesTwice, 1.0), (ParameterServer, 0.5), (ParameterServer, 2.0)]
)
def test_a_wrong_server_fails_its_checks(rules: type[ParameterServer], rate: float) -> None:
    assert Run(rules=rules, rate=rate).failed_checks() >= IN_THE_SERVER


def test_a_changed_update_fails_its_checks() -> None:
    assert Run(rules=HalvesUpdates).failed_checks() >= {"gradients", "weights"}


class ExceedsBudget(ParameterServer):
    """A server that grants one step above its budget."""

    def start(self, worker: int, most: int = 1) -> int:
        self.budget += self.budget == 1
        return super().start(worker, most)


def test_a_server_that_exceeds_its_budget_is_detected() -> None:
    for rules, wanted in ((ParameterServer, 9), (ExceedsBudget, 10)):
        server, recorder = rules(torch.zeros(1), [0], lr=LR, budget=9), Recorder([0])
        number = 0
        while granted := server.start(0, MOST):
            recorder.started(0, granted)
            number += 1
            server.push(0, number, torch.zeros(1))
            recorder.pushed(0, number, torch.zeros(1), 0.0)
        assert audit(recorder.seen, [0]).granted == wanted


def test_a_lost_or_repeated_update_is_counted() -> None:
    recorder = Recorder(range(2))
    for number in (1, 2):
        recorder.started(0, 1)
        recorder.pushed(0, number, torch.zeros(1), 0.0)

    def wrong(pushes: int, steps: int) -> int:
        return count_wrong_updates(audit(recorder.seen, range(2)), {0: Report(pushes, steps, "")})

    assert wrong(2, 2) == 0
    assert wrong(3, 2) == 1, "one did not arrive"
    assert wrong(1, 2) == 1, "one was applied twice"
    assert wrong(2, 3) == 1, "a step is missing"


def run_keeping_rank(group: dist.ProcessGroup, settings: dict[str, str], folder: str) -> list[str]:
    class Keeping(Worker):
        """A worker whose final weights differ."""

        def train(self, client: Client, most: int) -> None:
            super().train(client, most)
            self.vectors.weights[0] += 1e-3

    return one_rank(group, settings, folder, replace(MODE, run=partial(run_server, worker=Keeping)))


def test_a_worker_with_different_final_weights_fails(ranks: Ranks, tmp_path: Path) -> None:
    settings = TINY | {"RUN_MODE": "server", "LAB_MODEL": "mlp", "LAB_VARIANT": "downpour", "LAB_PROOF": "0"}
    lines = ranks(
        2, run_keeping_rank, settings | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}, str(tmp_path), timeout_s=100
    )
    run = judge({rank: [from_line(line) for line in of_rank] for rank, of_rank in enumerate(lines)})
    assert failed(run) == {"final weights"}


def test_a_wrong_order_of_events_fails() -> None:
    run = Run()
    run.order = run.order[::-1]
    assert "order of events" in run.failed_checks()
    ahead = Replay(run.replay.one, run.replay.weights, WORKERS)
    order = []
    for worker, number in ((1, 1), (1, 2), (0, 1)):
        ahead.started(worker, 1)
        order.append((START, worker))
        if worker == 1:
            ahead.pushed(1, number, torch.zeros_like(ahead.weights), 0.0)
            order.append((PUSH, 1))
    assert misordered(ahead.seen, order, WORKERS, staleness=1) == 0
    ahead.started(1, 1)
    assert misordered(ahead.seen, [*order, (START, 1)], WORKERS, staleness=1) == 1, "two steps ahead of workers 0 and 2"


class TooFar(ParameterServer):
    """A server that lets a worker be one step too far ahead."""

    def may_start(self, worker: int) -> bool:
        return self.spent or self.staleness is None or self.lead(worker) <= self.staleness + 1


class TooNear(ParameterServer):
    """A server that makes a worker wait one step too early."""

    def may_start(self, worker: int) -> bool:
        return self.spent or self.staleness is None or self.lead(worker) < self.staleness


class WaitsForLeft(ParameterServer):
    """A server that waits for a worker that has left."""

    def leave(self, worker: int) -> None:
        clock = self.clocks[worker]
        super().leave(worker)
        self.clocks[worker] = clock


@pytest.mark.parametrize("staleness", [0, 2, None])
@pytest.mark.parametrize("workers", [1, 2, 3, 8])
def test_workers_start_within_the_staleness_bound(workers: int, staleness: int | None) -> None:
    for seed in range(3):
        assert count_wrong_starts(ParameterServer, workers, staleness, seed) == 0
        if staleness is not None and workers > 1:
            assert count_wrong_starts(TooFar, workers, staleness, seed) > 0
            assert count_wrong_starts(TooNear, workers, staleness, seed) > 0
            assert count_wrong_starts(WaitsForLeft, workers, staleness, seed) > 0 or workers == 2


def test_staleness_and_lead_follow_the_recorded_events() -> None:
    events = [Event(START, rank, 1) for rank in (0, 1, 2)]
    events += [Event(PUSH, rank, 1, 1) for rank in (2, 0, 1)]
    assert audit(events, range(3)).staleness == [0, 1, 2]
    events += [Event(START, 0, 1), Event(PUSH, 0, 1, 2), Event(START, 0, 1)]
    found = audit(events, range(3))
    assert (found.lead, found.wrong_numbers, found.steps[0], found.granted) == (1, 0, [1, 1], 5)
    assert audit([*events, Event(PUSH, 0, 1, 2)], range(3)).wrong_numbers == 1, "applied twice"
    assert audit([*events, Event(PUSH, 0, 1, 4)], range(3)).wrong_numbers == 1, "one is missing"
