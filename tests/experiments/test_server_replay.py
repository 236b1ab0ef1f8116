"""What asynchronous workers and their server are held to, fault by fault, with all workers in this process.

Each fault is one line that somebody gets wrong; the run with it is the control of the check that has to see it.
"""

from collections.abc import Iterator
from itertools import accumulate
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from experiments.server.promises import Report, digest, granted_steps, miscounted, misfetched, misjudged, unlike
from experiments.server.reference import OneProcess, cuts
from experiments.server.replay import Replay, misdealt, recomputed, rounding
from experiments.server.witness import Seen, Witness, audit, drawn
from experiments.server.worker import Worker
from tests.labs import TINY
from workers.config import Config
from workers.parallel.parameter_server import PUSH, START, ParameterServer, draw_order
from workers.parallel.serving import Client
from workers.workload.data import Batches, shard_sizes
from workers.workload.model import build_model

WORKERS, MOST, LR, BUDGET = 3, 2, 0.01, 24
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Sizes so small that a second thread only waits for a core."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def config_of(**settings: str) -> Config:
    small = {"RUN_MODE": "server", "LAB_DEPTH": "1", "WORLD_SIZE": str(WORKERS), "LAB_BATCH": "7"}
    return Config.read(TINY | small | settings)


class Run:
    """Workers of one process that go through a drawn order at a server, with a witness and a replay beside it."""

    def __init__(
        self, kind: type[Worker] = Worker, rules: type[ParameterServer] = ParameterServer, rate: float = 1.0,
        **settings: str,
    ) -> None:  # fmt: skip
        config = config_of(**settings)
        batches = Batches(config, proof=True, device=CPU, dtype=torch.float64)
        self.one = OneProcess(build_model(config, 1).double(), config, proof=True, device=CPU, dtype=torch.float64)
        self.workers = [kind(build_model(config, 1).double(), config, batches, r, LR) for r in range(WORKERS)]
        start = self.workers[0].vectors.weights
        self.witness = Witness(start, range(WORKERS), LR, None, 0)
        self.replay = Replay(self.one, start, WORKERS, staleness=None)
        self.rules = rules(start.clone(), range(WORKERS), lr=LR * rate, budget=BUDGET)
        self.order = draw_order(1, ParameterServer(torch.zeros(1), range(WORKERS), lr=0.0, budget=BUDGET), MOST)
        self.go_through(self.order)
        self.seen = audit(self.witness.seen, range(WORKERS))

    def go_through(self, order: list[tuple[str, int]]) -> None:
        under_way: dict[int, tuple[Tensor, float]] = {}
        for kind, rank in order:
            worker = self.workers[rank]
            if kind == START:
                granted = worker.fetch(cast(Client, self), MOST)
                worker.fetched.append(float(worker.vectors.weights.sum()))
                for each in (self.witness, self.replay):
                    each.started(rank, granted)
                update = torch.zeros_like(worker.vectors.weights)
                under_way[rank] = update, worker.accumulate(update, granted)
                worker.note(update)
            else:
                update, loss = under_way.pop(rank)
                self.rules.push(rank, len(worker.sent), update)
                for each in (self.witness, self.replay):
                    each.pushed(rank, len(worker.sent), update, loss)

    def start(self, most: int, weights: Tensor) -> int:
        """The client of whoever asks next."""
        asked = [rank for kind, rank in self.order if kind == START][len(self.rules.history) - self.pushes]
        weights.copy_(self.rules.weights)
        return self.rules.start(asked, most)

    @property
    def pushes(self) -> int:
        return sum(event.kind == PUSH for event in self.rules.history)

    def found(self) -> set[str]:
        """The checks that would fail."""
        reports = {
            rank: Report(worker.fetched, worker.sent, worker.samples, worker.steps, 0.0, 0.0, "")
            for rank, worker in enumerate(self.workers)
        }
        misdealt_pushes = sum(misdealt(self.one, r, self.replay.spans[r], reports[r].samples) for r in reports)
        off = {
            "losses": self.replay.losses,
            "gradients": self.replay.gradients,
            "weights": (self.rules.weights - self.replay.weights).abs().max().item(),
            "samples": misdealt_pushes,
            "order of events": self.replay.seen != self.order,
            "updates": miscounted(self.seen, reports),
            "fetched weights": misfetched(self.seen, reports),
            "weights of the run": digest(self.rules.weights) != digest(self.witness.weights),
            "gradients of the run": recomputed(self.one, self.witness.kept, LR) > rounding(torch.float64, 1, 1, MOST),
        }
        return {name for name, value in off.items() if value > 1e-12}


class WeighedTwice(Worker):
    """A loss weight applied twice: in the loss, and to its gradient."""

    def backward(self) -> float:
        loss = super().backward()
        self.vectors.gradients *= self.batches.share(1, 1) * 100
        return loss


class Alike(Worker):
    """All on worker 0's shard."""

    def backward(self) -> float:
        mine, self.rank = self.rank, 0
        loss = super().backward()
        self.rank = mine
        return loss


class FirstBatch(Worker):
    """For ever on the first batch."""

    def backward(self) -> float:
        steps, self.steps = self.steps, 0
        loss = super().backward()
        self.steps = steps
        return loss


class Uncleared(Worker):
    """Gradients of the step before still in."""

    def backward(self) -> float:
        before = self.vectors.gradients.clone()
        loss = super().backward()
        self.vectors.gradients += before
        return loss


class Still(Worker):
    """Takes no steps on the way: all gradients of a push at the weights that it fetched."""

    def accumulate(self, update: Tensor, steps: int) -> float:
        rate, self.lr = self.lr, 0.0
        loss = super().accumulate(update, steps)
        self.lr = rate
        return loss


class Repeating(Worker):
    """Pushes N times."""

    def note(self, update: Tensor) -> None:
        update *= self.num_workers
        super().note(update)


class Sums(Worker):
    """Calls the sum of losses their mean."""

    def accumulate(self, update: Tensor, steps: int) -> float:
        return super().accumulate(update, steps) * steps


class Deaf(Worker):
    """Never takes what it fetches."""

    def fetch(self, client: Any, most: int) -> int:
        return super().fetch(client, most) if not self.steps else int(client.start(most, self.vectors.weights.clone()))


class Forgetful(ParameterServer):
    """Loses worker 1's second update."""

    def push(self, worker: int, number: int, update: Tensor) -> None:
        super().push(worker, number, torch.zeros_like(update) if (worker, number) == (1, 2) else update)


class Eager(ParameterServer):
    """Applies worker 1's second update twice."""

    def push(self, worker: int, number: int, update: Tensor) -> None:
        super().push(worker, number, update)
        if (worker, number) == (1, 2):
            self.weights.add_(update, alpha=-self.lr)


class Halving(ParameterServer):
    """Changes an update in place that another still reads."""

    def push(self, worker: int, number: int, update: Tensor) -> None:
        super().push(worker, number, update.mul_(0.5))


IN_THE_PUSH = {"gradients", "weights", "gradients of the run"}
IN_THE_SERVER = {"gradients", "losses", "weights", "weights of the run", "fetched weights"}


@pytest.mark.parametrize("model", ["line", "mlp", "gpt"])
def test_what_is_right_passes_every_check(model: str) -> None:
    assert Run(LAB_MODEL=model).found() == set()
    assert Run(LAB_MODEL=model, LAB_MICROBATCHES="2").found() == set()


@pytest.mark.parametrize(
    ("kind", "seen"),
    [
        (WeighedTwice, IN_THE_PUSH),
        (Repeating, IN_THE_PUSH),
        (Uncleared, IN_THE_PUSH),
        (Still, IN_THE_PUSH),
        (Alike, IN_THE_PUSH | {"samples", "losses"}),
        (FirstBatch, IN_THE_PUSH | {"samples", "losses"}),
        (Deaf, IN_THE_PUSH | {"fetched weights", "losses"}),
        (Sums, {"losses"}),
    ],
)
def test_a_wrong_worker_fails_by_name(kind: type[Worker], seen: set[str]) -> None:
    assert seen <= Run(kind).found()


@pytest.mark.parametrize(
    ("rules", "rate"), [(Forgetful, 1.0), (Eager, 1.0), (ParameterServer, 0.5), (ParameterServer, 2.0)]
)
def test_a_wrong_server_fails_by_name(rules: type[ParameterServer], rate: float) -> None:
    assert Run(rules=rules, rate=rate).found() >= IN_THE_SERVER


def test_an_update_that_is_changed_on_its_way_fails_by_name() -> None:
    assert "updates" in Run(rules=Halving).found()


class Generous(ParameterServer):
    """Grants a step that it has not."""

    def start(self, worker: int, most: int = 1) -> int:
        self.budget += self.budget == 1
        return super().start(worker, most)


def test_a_server_that_grants_more_than_its_budget_fails_by_name() -> None:
    for rules, wanted in ((ParameterServer, 9), (Generous, 10)):
        server, witness = rules(torch.zeros(1), [0], lr=LR, budget=9), Witness(torch.zeros(1), [0], LR, None, 0)
        number = 0
        while granted := server.start(0, MOST):
            witness.started(0, granted)
            number += 1
            server.push(0, number, torch.zeros(1))
            witness.pushed(0, number, torch.zeros(1), 0.0)
        assert granted_steps(witness) == wanted


def test_a_rank_that_ends_with_other_weights_fails_by_name() -> None:
    witness = Witness(torch.zeros(2), range(2), 1.0, set(), 0)

    def report(weights: Tensor) -> Report:
        return Report([], [], [], 0, 0.0, 0.0, digest(weights))

    assert unlike(witness, {0: report(torch.zeros(2)), 1: report(torch.zeros(2))}) == 0
    assert unlike(witness, {0: report(torch.zeros(2)), 1: report(torch.tensor([0.0, 1e-9]))}) == 1


def test_another_order_than_the_drawn_one_fails_by_name() -> None:
    run = Run()
    run.order = run.order[::-1]
    assert "order of events" in run.found()
    bounded = Replay(run.one, run.witness.weights, WORKERS, staleness=1)
    bounded.clocks[0] = 2
    bounded.started(0, 1)
    bounded.started(1, 1)
    assert bounded.too_early == 1


class TooFar(ParameterServer):
    """Lets a worker be one step farther ahead."""

    def may_start(self, worker: int) -> bool:
        return self.spent or self.staleness is None or self.lead(worker) <= self.staleness + 1


class TooNear(ParameterServer):
    """Lets a worker wait one step too early."""

    def may_start(self, worker: int) -> bool:
        return self.spent or self.staleness is None or self.lead(worker) < self.staleness


class Mourning(ParameterServer):
    """Waits for a worker that has left."""

    def leave(self, worker: int) -> None:
        clock = self.clocks[worker]
        super().leave(worker)
        self.clocks[worker] = clock


@pytest.mark.parametrize("staleness", [0, 2, None])
@pytest.mark.parametrize("workers", [1, 2, 3, 8])
def test_the_rules_let_start_whom_the_bound_lets(workers: int, staleness: int | None) -> None:
    for seed in range(3):
        assert misjudged(ParameterServer, workers, staleness, seed) == 0
        if staleness is not None and workers > 1:
            assert misjudged(TooFar, workers, staleness, seed) > 0
            assert misjudged(TooNear, workers, staleness, seed) > 0
            assert misjudged(Mourning, workers, staleness, seed) > 0 or workers == 2


@pytest.mark.parametrize("model", ["line", "mlp", "gpt"])
@pytest.mark.parametrize("proof", [False, True])
def test_the_one_process_deals_what_the_batches_are_said_to_deal(model: str, *, proof: bool) -> None:
    config = config_of(LAB_MODEL=model)
    one = OneProcess(build_model(config, 1).double(), config, proof=proof, device=CPU, dtype=torch.float64)
    batches = Batches(config, proof=proof, device=CPU, dtype=torch.float64)
    for step in (0, 1, 2, 9, 1500):
        for rank in range(WORKERS):
            parts = batches.dealt(step, rank, WORKERS)
            for found, wanted in zip(one.samples(step, rank), zip(*parts, strict=True), strict=False):
                assert torch.equal(found, torch.cat(wanted))


def test_shards_are_cut_alike_however_uneven() -> None:
    for batch in range(1, 20):
        for workers in range(1, min(batch, 8) + 1):
            for uneven in (False, True):
                wanted = [0, *accumulate(shard_sizes(batch, workers, uneven=uneven))]
                assert cuts(batch, workers, uneven=uneven) == wanted


def test_staleness_and_lead_are_read_from_what_was_seen() -> None:
    seen = [Seen(START, rank, 1) for rank in (0, 1, 2)]
    seen += [Seen(PUSH, rank, 1, 1) for rank in (2, 0, 1)]
    assert audit(seen, range(3)).staleness == [0, 1, 2]
    seen += [Seen(START, 0, 1), Seen(PUSH, 0, 1, 2), Seen(START, 0, 1)]
    found = audit(seen, range(3))
    assert (found.lead, found.wrong_numbers, found.steps[0]) == (1, 0, [1, 1])
    assert audit([*seen, Seen(PUSH, 0, 1, 2)], range(3)).wrong_numbers == 1, "applied twice"
    assert audit([*seen, Seen(PUSH, 0, 1, 4)], range(3)).wrong_numbers == 1, "one is missing"


def test_no_more_is_kept_than_is_asked_for() -> None:
    wanted = drawn(1, 3, 5)
    assert wanted > {(0, 1), (1, 1), (2, 1)} and len(wanted) == 5 and drawn(1, 3, 1) == {(0, 1), (1, 1), (2, 1)}
    witness = Witness(torch.zeros(2), range(3), 1.0, wanted, most_steps=5)
    for number in range(1, 4):
        for worker in range(3):
            witness.started(worker, 4)
            witness.pushed(worker, number, torch.ones(2), 0.0)
    assert [(push.worker, push.steps) for push in witness.kept] == [(0, 4), (1, 4)], "two at least, and then no more"
    witness.started(2, 4)
    witness.left(2)
    assert witness.finished == {0: 12, 1: 12, 2: 12} and witness.seen[-1].steps == 4
