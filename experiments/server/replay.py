"""One process that computes again what workers pushed, in the order in which it came.

Which weights a gradient was computed at, and which updates came between, is all that asynchrony adds to SGD. Both
follow from the order in which workers start and push. It is replayed twice. Rehearsed, in float64, with every message
taken in an order that LAB_SEED draws: one process goes along, event by event, with weights of its own that only its own
gradients move, and every push must be its own. And of the real run, in LAB_DTYPE and the order that happened: some
pushes are computed again from the weights that the witness gave each of them (witness.py). The process shares no line
with the workers (reference.py).
"""

import math

import torch
from torch import Tensor

from experiments.server.reference import OneProcess
from experiments.server.rounds import model_of, shallow
from experiments.server.witness import Kept
from experiments.server.worker import Scheme, Worker
from workers.lab import Lab
from workers.measure.difference import larger
from workers.parallel.parameter_server import PUSH, START, Ordered, ParameterServer, draw_order
from workers.parallel.serving import Client, Link, Local, Remote, Server, Threads

TOLERANCE = 1e-12
LEARNING_RATE = 0.01
ROUNDS = 2  # pushes of a worker, in the mean
WORKERS_TEST = "tests/experiments/test_server_replay.py::test_a_wrong_worker_fails_by_name"
ORDER_TEST = "tests/experiments/test_server_replay.py::test_another_order_than_the_drawn_one_fails_by_name"
MOST_PROVEN = 4  # steps between a fetch and its push

Order = list[tuple[str, int]]


class Replay:
    """A `Witness` that computes every push itself, and holds what arrives against it."""

    def __init__(self, one: OneProcess, weights: Tensor, workers: int, staleness: int | None) -> None:
        self.one, self.weights, self.staleness = one, weights.clone(), staleness
        self.seen: Order = []
        self.spans: dict[int, list[tuple[int, int]]] = {rank: [] for rank in range(workers)}  # first step, steps
        self.clocks = dict.fromkeys(range(workers), 0)
        self.too_early = 0  # starts of one who was more than `staleness` ahead of the slowest
        self.gradients = self.losses = 0.0  # the largest differences
        self._began: dict[int, tuple[Tensor, int]] = {}

    def started(self, worker: int, steps: int) -> None:
        self.seen.append((START, worker))
        ahead = self.clocks[worker] - min(self.clocks.values())
        self.too_early += self.staleness is not None and ahead > self.staleness
        self._began[worker] = self.weights, steps

    def pushed(self, worker: int, number: int, update: Tensor, loss: float) -> None:  # noqa: ARG002
        self.seen.append((PUSH, worker))
        began, steps = self._began.pop(worker)
        own, own_loss = self.one.push(began, self.clocks[worker], steps, worker, LEARNING_RATE)
        self.gradients = larger(self.gradients, (own - update).abs().max().item())
        self.losses = larger(self.losses, abs(own_loss - loss))
        self.spans[worker].append((self.clocks[worker], steps))
        self.clocks[worker] += steps
        self.weights = self.weights - LEARNING_RATE * own

    def left(self, worker: int) -> None:
        self.seen.append(("leave", worker))


def prove(lab: Lab, links: dict[int, Link], scheme: Scheme, make_worker: type[Worker]) -> None:
    """The ranks' run in the drawn order, and one process that goes along on rank 0."""
    lab.at(0, f"proof of {scheme.name}")
    most = min(scheme.most, MOST_PROVEN)
    budget, ranks = ROUNDS * most * lab.world_size, range(lab.world_size)
    rules = ParameterServer(torch.zeros(1), ranks, lr=0.0, budget=budget, staleness=scheme.staleness)
    order = draw_order(lab.config.seed, rules, most)
    config, batches = shallow(lab.config), lab.batches(torch.float64, proof=True)
    worker = make_worker(model_of(lab, config), config, batches, lab.rank, LEARNING_RATE)
    client: Client
    if lab.rank == 0:
        start = worker.vectors.weights.cpu()
        one = OneProcess(model_of(lab, config), config, proof=True, device=lab.device, dtype=torch.float64)
        replay = Replay(one, start, lab.world_size, scheme.staleness)
        ordered = Ordered(order, start.clone(), ranks, lr=LEARNING_RATE, budget=budget)
        server = Server(ordered, lab.config.collective_timeout_s, replay)
        threads = Threads(server, links)
        client = Local(server, 0)
    else:
        client = Remote(links[lab.rank], worker.vectors.weights)
    worker.train(client, most)
    lab.stepped()
    samples = lab.exchange.gather(f"samples of {scheme.name}", worker.samples)
    if samples is not None:
        threads.join()
        judge(lab, scheme.name, replay, order, samples, ordered.weights)
    lab.exchange.barrier(f"proof of {scheme.name}")


def judge(lab: Lab, name: str, replay: Replay, order: Order, samples: list[list[str]], weights: Tensor) -> None:
    """What the process that went along found; `samples` are the digests of each rank's pushes."""
    lab.check("losses", replay.losses, TOLERANCE, variant=name, control=WORKERS_TEST)
    lab.check("gradients", replay.gradients, TOLERANCE, variant=name, control=WORKERS_TEST)
    lab.check("weights", (weights - replay.weights).abs().max().item(), TOLERANCE, variant=name, control=WORKERS_TEST)
    wrong = sum(misdealt(replay.one, rank, replay.spans[rank], of_rank) for rank, of_rank in enumerate(samples))
    detail = f"rehearsed: of {sum(map(len, samples))} pushes, those of other samples than (seed, step, rank) give"
    lab.check("samples", wrong, 0, variant=name, detail=detail, control=WORKERS_TEST)
    differing = sum(one != other for one, other in zip(replay.seen, order, strict=False))
    differing += abs(len(replay.seen) - len(order)) + replay.too_early
    detail = f"{len(order)} events; difference: those that came elsewhere than drawn, or before the bound allows"
    lab.check("order of events", differing, 0, variant=name, detail=detail, control=ORDER_TEST)


def misdealt(one: OneProcess, rank: int, spans: list[tuple[int, int]], samples: list[str]) -> int:
    """Pushes of `rank`, of some steps each, that are not of the samples that `one` deals."""
    wanted = [one.digest(first_step, steps, rank) for first_step, steps in spans]
    return sum(a != b for a, b in zip(wanted, samples, strict=False)) + abs(len(wanted) - len(samples))


def recomputed(one: OneProcess, kept: list[Kept], lr: float) -> float:
    """How far pushes are from those of one process: the longest difference, over the longest of its own pushes.

    Not each over its own: where training has converged, a gradient is the rounding of terms that cancel.
    """
    longest = apart = 0.0
    for push in kept:
        own, _ = one.push(push.weights, push.first_step, push.steps, push.worker, lr)
        longest = larger(longest, own.double().norm().item())
        apart = larger(apart, (own - push.update).double().norm().item())
    return apart / longest if longest else apart


def rounding(dtype: torch.dtype, depth: int, parts: int, steps: int) -> float:
    """What rounding in `dtype` may put between two ways to add up a push of `steps` steps of `parts` microbatches.

    Half an eps for each of the sums of gradients, all in the same direction. And the passes themselves: in batches of
    another size each result may be rounded otherwise, about 20 of a layer forward and backward, unrelated to each
    other, so that they add up as their root. Seen: 2.4 eps in float32 and 0.8 in bf16, of 8 layers, 4 parts, 4 steps,
    where this is 11.
    """
    return torch.finfo(dtype).eps / 2 * (parts + steps + math.sqrt(20 * (depth + 2)))
