"""The asynchronous variant `downpour`, with rank 0 as the server and a separate link to each worker.

It runs twice. First in an order of events drawn by LAB_SEED, where one process follows it and must get the same pushes
and weights (checks.py). Then in order of arrival: that is not reproducible, so it is informational, except for what
holds in any order: no worker starts more than LAB_STALENESS steps ahead of the slowest, the budget of steps is used up,
every pushed update counts once, and all ranks end with the server's weights. All workers together take N x LAB_STEPS
steps, faster ones more of them; each weights its gradient by its share of the batch, so that the same number of samples
moves the weights as far as in `dp`. In this run a worker may die: the server continues with the others, and only its
steps under way are lost.
"""

import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from distlab.lab.lab import Lab
from distlab.lab.measure.tensors import digest_of
from distlab.techniques.collectives.costs import wire_tolerance
from distlab.techniques.collectives.phases import slowed
from distlab.techniques.parameter_server.server import (
    PUSH,
    Client,
    Event,
    Link,
    Local,
    ParameterServer,
    Recorder,
    Remote,
    Server,
    Threads,
    Worker,
)

from .checks import Audit, audit, prove_asynchronous
from .options import Options
from .predictions import DOWNPOUR, RUN_BYTES, weight_bytes

RULE_EVENTS = 200  # drawn to test the rules


@dataclass
class Report:
    """The run of one worker, in its own report."""

    pushes: int
    steps: int
    weights: str  # a digest of its final weights


class Finished(NamedTuple):
    """A real run, with all that rank 0 knows of it."""

    seen: list[Event]
    audit: Audit
    weights: Tensor  # [P] the server's, at the end
    reports: dict[int, Report]  # of the workers that have not left


def run(lab: Lab, rules: type[ParameterServer], worker: type[Worker]) -> None:
    """Prove `downpour`, then run its workers asynchronously under `rules`."""
    if not lab.wants(DOWNPOUR):
        return
    if unable := lab.mode.cannot(lab.config).get(DOWNPOUR):
        lab.skip(DOWNPOUR, unable)
        return
    links = open_links(lab)
    if lab.config.proof:
        prove_asynchronous(lab, links, rules, worker)
        lab.finished("proof", [DOWNPOUR])
    finished = run_freely(lab, links, rules, worker)
    if lab.rank == 0:
        check_run(lab, finished, rules)
        show_run(lab, finished)


def open_links(lab: Lab) -> dict[int, Link]:
    """Return a link to each worker by rank on the server, and its own on a worker."""
    at_server, timeout_s = lab.rank == 0, lab.config.collective_timeout_s
    workers = range(1, lab.world_size) if at_server else [lab.rank]
    stores = {worker: dist.PrefixStore(f"link {worker}", lab.exchange.store) for worker in workers}
    return {worker: Link(store, at_server=at_server, timeout_s=timeout_s) for worker, store in stores.items()}


def run_freely(
    lab: Lab, links: dict[int, Link], rules_class: type[ParameterServer], make_worker: type[Worker]
) -> Finished:
    """Run in order of arrival; the records of all ranks are gathered on rank 0."""
    config, dtype = lab.config, getattr(torch, lab.config.dtype)
    lab.at(0, DOWNPOUR)
    recorder = Recorder(rank for rank in range(lab.world_size) if rank not in lab.exchange.lost)
    workers = list(recorder.finished)

    def on_step(step: int) -> None:
        lab.begin_step(step, DOWNPOUR)
        lab.work.reach(sum(recorder.finished.values()))

    worker = make_worker(lab.model(dtype), config, lab.batches(dtype), lab.rank, config.learning_rate, on_step=on_step)
    rules, client, threads = open_server(lab, links, rules_class, recorder, worker)
    lab.say(f"{lab.world_size * config.steps} steps in order of arrival; workers: {len(workers)}", DOWNPOUR)
    with (
        lab.work.of(lab.world_size * config.steps, "steps of all workers"),
        lab.count(calls=False) as traffic,
        slowed(config.slowed_to),
    ):
        lab.exchange.barrier(DOWNPOUR)  # a late worker would find steps already taken by the others
        worker.train(client, config.own(Options).local_steps)
        if threads is not None:
            threads.join()
    lab.stepped()
    report = Report(len(worker.samples), worker.steps, digest_of([worker.vectors.weights]))
    reports_by_rank = lab.exchange.everyone(f"reports of {DOWNPOUR}", asdict(report))
    reports = {rank: Report(**fields) for rank, fields in enumerate(reports_by_rank) if fields is not None}
    if traffic.wire_error is None:
        compare_bytes(lab, reports, traffic.wire_bytes)
    seen = audit(recorder.seen, workers)
    note_versions(lab, report, seen)
    return Finished(recorder.seen, seen, rules.weights, reports)


def note_versions(lab: Lab, report: Report, seen: Audit) -> None:
    """Log on each worker the versions of the weights that it used, and how stale its updates were."""
    by_worker = {str(worker): pairs for worker, pairs in seen.versions.items()}
    pairs_here = lab.exchange.share(f"versions of {DOWNPOUR}", by_worker).get(str(lab.rank), [])
    first = ", ".join(f"{fetched} to {pushed}" for fetched, pushed in pairs_here[:6]) + (
        f" and {len(pairs_here) - 6} more" if len(pairs_here) > 6 else ""
    )
    stale = [pushed - fetched for fetched, pushed in pairs_here] or [0]
    lab.note(
        "versions",
        f"in {DOWNPOUR} I made {report.pushes} push{'es' * (report.pushes != 1)} in {report.steps} steps; each was"
        f" computed at one version of the weights and added to another: {first}; {fmean(stale):.2f} versions late on"
        f" average, at most {max(stale)}",
    )


def compare_bytes(lab: Lab, reports: Mapping[int, Report], wire_bytes: float) -> None:
    """Compare the bytes of this worker's pushes, or of the others' fetches on the server, with those sent."""
    if len(reports) < lab.world_size:
        lab.waive(RUN_BYTES, "a worker has left", DOWNPOUR)
        return
    fetches = sum(report.pushes + 1 for rank, report in reports.items() if rank)
    sent = reports[lab.rank].pushes if lab.rank else fetches
    predicted = sent * weight_bytes(lab.config)
    tolerance = wire_tolerance(predicted, 4 * sent + 4) if lab.world_size > 1 else 0.0
    formula = "fetches of others x S" if lab.rank == 0 else "pushes x S"
    lab.compare(RUN_BYTES, predicted, wire_bytes, "B", tolerance, DOWNPOUR, formula)


def open_server(
    lab: Lab, links: dict[int, Link], rules_class: type[ParameterServer], recorder: Recorder, worker: Worker
) -> tuple[ParameterServer, Client, Threads | None]:
    """Return the rules and this rank's client; on rank 0 also the server, which is notified of workers that leave."""
    config, weights, workers = lab.config, worker.vectors.weights, list(recorder.finished)
    budget, start = lab.world_size * config.steps, weights.cpu().clone()
    rules = rules_class(start, workers, lr=config.learning_rate, budget=budget, staleness=config.own(Options).staleness)
    server = Server(rules, config.collective_timeout_s, recorder)
    lab.hooks.let_leave(server.leave)
    if lab.rank > 0:
        return rules, Remote(links[lab.rank], weights), None
    for rank in lab.exchange.lost & set(workers):  # it left while the server was created
        server.leave(rank)
    return rules, Local(server, 0), Threads(server, {rank: links[rank] for rank in workers if rank})


# --- checks for any order ---


def check_run(lab: Lab, run: Finished, rules_class: type[ParameterServer]) -> None:
    """Check a real run by its events and its remaining workers, and test its rules, of `rules_class`."""

    def check(name: str, wrong: int, detail: str) -> None:
        lab.check(name, wrong, 0, DOWNPOUR, detail)

    seen, bound, budget = run.audit, lab.config.own(Options).staleness, lab.world_size * lab.config.steps
    if bound is not None:
        detail = "largest lead over the slowest worker at the start of a step, in finished steps"
        lab.check("staleness", seen.lead, bound, DOWNPOUR, detail)
    check(
        "who may start", count_wrong_starts(rules_class, lab.world_size, bound, lab.config.seed),
        f"starts in {RULE_EVENTS} random events on which the server and the bound disagree",
    )  # fmt: skip
    check(
        "budget", abs(seen.granted - budget),
        f"{seen.granted} steps were granted, the budget of all workers is {budget}",
    )  # fmt: skip
    check(
        "updates", count_wrong_updates(seen, run.reports),
        f"{len(seen.staleness)} applied; difference: those of remaining workers that did not count exactly once",
    )  # fmt: skip
    check(
        "final weights", sum(report.weights != digest_of([run.weights]) for report in run.reports.values()),
        "ranks whose final weights differ from the server's",
    )  # fmt: skip


def count_wrong_updates(seen: Audit, reports: Mapping[int, Report]) -> int:
    """Count updates not applied exactly once and in order, and missing steps."""
    wrong = seen.wrong_numbers
    for rank, report in reports.items():
        wrong += abs(report.pushes - len(seen.steps[rank])) + abs(report.steps - sum(seen.steps[rank]))
    return wrong


def count_wrong_starts(rules_class: type[ParameterServer], workers: int, staleness: int | None, seed: int) -> int:
    """Count how often rules of `rules_class` and the bound disagree about a start, over events drawn by `seed`.

    A worker that has finished c steps may start another if the slowest has finished at least c - staleness (Ho et al.
    2013, section 2). The last worker is slow, and leaves halfway.
    """
    rules = rules_class(torch.zeros(1), range(workers), lr=0.0, budget=2 * RULE_EVENTS, staleness=staleness)
    draw, clocks, busy, wrong = random.Random(seed), dict.fromkeys(range(workers), 0), set[int](), 0
    for event in range(RULE_EVENTS):
        if event == RULE_EVENTS // 2 and workers > 1:
            rules.leave(workers - 1)
            del clocks[workers - 1]
            busy.discard(workers - 1)
        idle = [worker for worker in clocks if worker not in busy]
        allowed = [w for w in idle if staleness is None or clocks[w] - staleness <= min(clocks.values())]
        wrong += sum(rules.may_start(worker) != (worker in allowed) for worker in idle)
        ready = [*allowed, *busy]
        worker = draw.choice([each for each in ready if each < workers - 1 or draw.random() < 0.1] or ready)
        if worker in busy:
            clocks[worker] += 1
            rules.push(worker, clocks[worker], torch.zeros(1))
        else:
            rules.start(worker)
        busy ^= {worker}
    return wrong


def show_run(lab: Lab, run: Finished) -> None:
    """Show the server's record by worker, and the loss by samples applied."""
    steps = ", ".join(str(sum(worker_steps)) for worker_steps in run.audit.steps.values())
    stale = run.audit.staleness
    mean = f"{fmean(stale or [0]):.2f}"
    columns = ["", "steps by worker", "updates", "mean staleness", "largest", "largest lead in steps"]
    rows = [[DOWNPOUR, steps, len(stale), mean, max(stale, default=0), run.audit.lead]]
    lab.table("The server's record; staleness: updates of other workers between a fetch and its push", columns, rows)
    title = "Loss of the asynchronous run, at each worker's weights"
    lab.chart(title, "updates applied", "loss", {DOWNPOUR: smoothed(run.seen, lab.world_size)})
    lab.say(f"steps by worker: {steps}; mean staleness {mean}", "result", at="normal")


def smoothed(seen: list[Event], num_workers: int) -> list[list[float]]:
    """Return the losses of the pushes in order of application, averaged over as many as there are workers."""
    losses = [event.loss for event in seen if event.kind == PUSH]
    ends = range(1, len(losses) + 1)
    return [[float(end - 1) for end in ends], [fmean(losses[max(0, end - num_workers) : end]) for end in ends]]
