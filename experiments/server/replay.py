"""The proof of what is asynchronous: an order of events drawn by LAB_SEED, kept by all ranks, and replayed in one
process.

Which weights a gradient was computed at, and which updates came between, is all that asynchrony adds to SGD. Both
follow from the order in which workers start and push. So the ranks run with every message taken in a given order, and
one process that goes through the same order with a plain loop, nothing sent and no server, must come to the same
weights and to the same staleness of each update.
"""

import torch
from torch import Tensor

from experiments.server.rounds import model_of, shallow
from experiments.server.worker import Scheme, Worker
from workers.lab import Lab
from workers.parallel.parameter_server import START, Ordered, ParameterServer, audit, draw_order
from workers.parallel.serving import Client, Link, Local, Remote, Server, Threads

TOLERANCE = 1e-12
LEARNING_RATE = 0.01
ROUNDS = 2  # pushes of a worker, in the mean
MOST_PROVEN = 4  # steps between a fetch and its push

Order = list[tuple[str, int]]


def prove(lab: Lab, links: dict[int, Link], scheme: Scheme) -> None:
    """Weights and staleness of the ranks' run in the drawn order, against its replay on rank 0."""
    lab.at(0, f"proof of {scheme.name}")
    most = min(scheme.most, MOST_PROVEN)
    budget, ranks = ROUNDS * most * lab.world_size, range(lab.world_size)
    rules = ParameterServer(torch.zeros(1), ranks, lr=0.0, budget=budget, staleness=scheme.staleness)
    order = draw_order(lab.config.seed, rules, most)
    worker = new_worker(lab, lab.rank)
    client: Client
    if lab.rank == 0:
        start = worker.vectors.weights.cpu().clone()
        ordered = Ordered(order, start.clone(), ranks, lr=LEARNING_RATE, budget=budget)
        server = Server(ordered, lab.config.collective_timeout_s)
        threads = Threads(server, links)
        client = Local(server, 0)
    else:
        client = Remote(links[lab.rank], worker.vectors.weights)
    worker.train(client, most)
    lab.stepped()
    if lab.rank == 0:
        threads.join()
        weights, staleness = replay(lab, order, start, budget, most)
        seen = audit(ordered.history, ranks)
        lab.check("weights", (ordered.weights - weights).abs().max().item(), TOLERANCE, variant=scheme.name)
        differing = sum(one != other for one, other in zip(seen.staleness, staleness, strict=True))
        detail = f"{len(staleness)} updates, {max(staleness)} others between the fetch and the push of the stalest"
        lab.check("order of events", differing, 0, variant=scheme.name, detail=detail)
    lab.exchange.barrier(f"proof of {scheme.name}")


def replay(lab: Lab, order: Order, start: Tensor, budget: int, most: int) -> tuple[Tensor, list[int]]:
    """The same events one after the other in this process; returns the weights [P], and how stale each update was."""
    workers = [new_worker(lab, rank) for rank in range(lab.world_size)]
    weights, applied = start.clone(), 0
    taken: dict[
        int, tuple[Tensor, int, int]
    ] = {}  # by worker: the weights it has, when it took them, and for how many steps
    staleness = []
    for kind, rank in order:
        if kind == START:
            steps = min(most, budget)
            budget -= steps
            taken[rank] = weights.clone(), applied, steps
            continue
        stale, at, steps = taken[rank]
        workers[rank].vectors.weights.copy_(stale)
        update = torch.zeros_like(workers[rank].vectors.weights)
        workers[rank].accumulate(update, steps)
        weights -= LEARNING_RATE * update.cpu()
        staleness.append(applied - at)
        applied += 1
    return weights, staleness


def new_worker(lab: Lab, rank: int) -> Worker:
    """Worker `rank` with one layer in float64, at the common start."""
    batches = lab.batches(torch.float64, proof=True)
    config = shallow(lab.config)
    return Worker(model_of(lab, config), config, batches, rank, LEARNING_RATE)
