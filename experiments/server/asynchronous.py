"""Workers that do not wait: `ssp` and `downpour`, with rank 0 as the server, and a link of its own to each worker.

Twice each. First in an order of events that LAB_SEED draws: workers compute where they are, the server takes their
messages in that order, and one process that goes along must come to the same pushes and weights (replay.py). Then for
real, in whatever order they come. That does not repeat, so a witness beside the server writes the order down and keeps
weights of its own (witness.py), and the run is held to it (promises.py): nobody starts a step more than LAB_STALENESS
ahead of the slowest (`ssp`), every worker has the weights of that moment and its own samples, every update counts
exactly once, and some of them are computed again by one process. All workers together take N x LAB_STEPS steps, who is
faster more of them; each weighs its gradient by its share of the batch, so that as many samples move the weights as far
as in `dp`.

From here on a worker may die: the server goes on with the others, and only what it had under way is lost.
"""

from dataclasses import asdict

import torch
import torch.distributed as dist

from experiments.server.pace import Rate, apart, compute_s, show_rates
from experiments.server.predictions import weight_bytes
from experiments.server.promises import Finished, Report, digest, hold
from experiments.server.replay import prove
from experiments.server.witness import Seen, Witness, audit, drawn
from experiments.server.worker import Scheme, Worker
from workers.lab import Lab
from workers.measure.formulas.messages import wire_tolerance
from workers.parallel.parameter_server import PUSH, ParameterServer
from workers.parallel.phases import recorded, slowed
from workers.parallel.serving import Client, Link, Local, Remote, Server, Threads

REPLAYED_STEPS = 8  # of each worker in the mean, that one process computes again


def run(lab: Lab, schemes: list[Scheme], rules: type[ParameterServer], worker: type[Worker], rates: list[Rate]) -> None:
    """Prove what is asked for, then let go of each other under `rules`; `rates` are those of what keeps step."""
    unable = lab.mode.cannot(lab.config)
    wanted = [scheme for scheme in schemes if lab.wants(scheme.name)]
    for name in (scheme.name for scheme in wanted if scheme.name in unable):
        lab.skip(name, unable[name])
    chosen = [scheme for scheme in wanted if scheme.name not in unable]
    if lab.config.trace and chosen:
        lab.say(
            f"{', '.join(scheme.name for scheme in chosen)} not profiled: there is no step that all ranks take", "trace"
        )
    links = open_links(lab) if chosen else {}
    for scheme in chosen if lab.config.proof else []:
        prove(lab, links, scheme, worker)
        lab.finished("proof", [each.name for each in chosen])
    finished = [run_freely(lab, links, scheme, rules, worker) for scheme in chosen]
    if lab.rank == 0:
        for each in finished:
            hold(lab, each, rules)
            if len(each.reports) == lab.world_size and all(report.steps for report in each.reports.values()):
                rates.append(apart(lab, each.scheme, each.reports, each.seen.steps))
        show_rates(lab, rates, schemes)
        show_run(lab, finished)


def open_links(lab: Lab) -> dict[int, Link]:
    """At the server a link to each worker, by rank; at a worker its own."""
    workers = range(1, lab.world_size) if lab.rank == 0 else [lab.rank]
    timeout_s = lab.config.collective_timeout_s
    return {
        worker: Link(
            dist.PrefixStore(f"link {worker}", lab.exchange.store), at_server=lab.rank == 0, timeout_s=timeout_s
        )
        for worker in workers
    }


def run_freely(
    lab: Lab, links: dict[int, Link], scheme: Scheme, kind: type[ParameterServer], make_worker: type[Worker]
) -> Finished:
    """One scheme in the order in which messages come; what each rank saw is brought together on rank 0."""
    config, name, dtype = lab.config, scheme.name, getattr(torch, lab.config.dtype)
    lab.at(0, name)
    workers = [rank for rank in range(lab.world_size) if rank not in lab.exchange.gone]

    def noted(step: int) -> None:
        lab.begin_step(step, name)
        lab.work.reach(sum(witness.finished.values()))

    worker = make_worker(
        lab.model(dtype), config, lab.batches(dtype), lab.rank, config.learning_rate, noted=noted
    )  # fmt: skip
    pushes = max(1, config.steps // scheme.most)
    wanted = drawn(config.seed, lab.world_size, pushes) if config.proof else set()
    most_steps = REPLAYED_STEPS * lab.world_size
    witness = Witness(worker.vectors.weights.cpu(), workers, config.learning_rate, wanted, most_steps)
    rules, client, threads = open_server(lab, links, scheme, kind, witness, worker)
    lab.say(f"{lab.world_size * config.steps} steps by {len(workers)} worker(s), in whatever order they come", name)
    with (
        lab.work.of(lab.world_size * config.steps, "steps of all workers"),
        lab.count(calls=False) as traffic,
        recorded() as spans,
        slowed(config.slowed_to),
    ):
        seconds = lab.seconds(lambda: worker.train(client, scheme.most))
        if threads is not None:
            threads.join()
    lab.stepped()
    weights = digest(worker.vectors.weights)
    report = Report(worker.fetched, worker.sent, worker.samples, worker.steps, compute_s(spans), seconds, weights)
    everyone = lab.exchange.everyone(f"reports of {name}", asdict(report))
    reports = {rank: Report(**of_rank) for rank, of_rank in enumerate(everyone) if of_rank is not None}
    if len(reports) == lab.world_size and traffic.wire_error is None:
        fetches = {rank: len(each.sent) + 1 for rank, each in reports.items()}
        sent = len(worker.sent) if lab.rank else sum(number for rank, number in fetches.items() if rank)
        predicted = sent * weight_bytes(config)
        tolerance = wire_tolerance(predicted, 4 * sent + 4) if lab.world_size > 1 else 0.0
        formula = "fetches of others x S" if lab.rank == 0 else "pushes x S"
        lab.compare(
            "wire bytes of the run", predicted, traffic.wire_bytes, "B", tolerance, name, formula,
            control="tests/experiments/test_server.py::test_bytes_that_nobody_asked_for_fail_by_name",
        )  # fmt: skip
    elif traffic.wire_error is None:
        lab.waive("wire bytes of the run", "a worker has left", name)
    return Finished(scheme, witness, audit(witness.seen, workers), rules.weights, reports)


def open_server(
    lab: Lab, links: dict[int, Link], scheme: Scheme, kind: type[ParameterServer], witness: Witness, worker: Worker
) -> tuple[ParameterServer, Client, Threads | None]:
    """The rules, and this rank's client; on rank 0 the server too, which hears of every worker that leaves."""
    config, weights, workers = lab.config, worker.vectors.weights, list(witness.finished)
    rules = kind(
        weights.cpu().clone(),
        workers,
        lr=config.learning_rate,
        budget=lab.world_size * config.steps,
        staleness=scheme.staleness,
    )
    server = Server(rules, config.collective_timeout_s, witness)
    if lab.let_leave is not None:
        lab.let_leave(server.leave)
    if lab.rank > 0:
        return rules, Remote(links[lab.rank], weights), None
    for rank in lab.exchange.gone & set(workers):  # it left while the server was made
        server.leave(rank)
    return rules, Local(server, 0), Threads(server, {rank: links[rank] for rank in workers if rank})


def show_run(lab: Lab, finished: list[Finished]) -> None:
    """What the server saw, by worker, and the loss over the samples that had moved the weights."""
    rows, curves = [], {}
    for each in finished:
        steps = ", ".join(str(sum(of_worker)) for of_worker in each.seen.steps.values())
        stale = each.seen.staleness
        rows.append(
            [
                each.scheme.name,
                steps,
                len(stale),
                f"{sum(stale) / max(1, len(stale)):.2f}",
                max(stale, default=0),
                each.seen.lead,
            ]
        )
        curves[each.scheme.name] = smoothed(each.witness.seen, lab.world_size)
    columns = ["", "steps by worker", "updates", "mean staleness", "largest", "largest lead in steps"]
    if rows:
        lab.table("What the server saw: staleness is the updates of others between a fetch and its push", columns, rows)
        lab.chart(
            "Loss of the asynchronous runs, at the weights that each worker had", "updates applied", "loss", curves
        )


def smoothed(seen: list[Seen], num_workers: int) -> list[list[float]]:
    """The losses of the pushes in the order in which they were applied, in means of as many as there are workers."""
    losses = [event.loss for event in seen if event.kind == PUSH]
    windows = [losses[max(0, end - num_workers) : end] for end in range(1, len(losses) + 1)]
    return [[float(index + 1) for index in range(len(losses))], [sum(window) / len(window) for window in windows]]
