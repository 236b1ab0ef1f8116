"""Workers that do not wait: `ssp` and `downpour`, with rank 0 as the server, and a link of its own to each worker.

Twice each. First in an order of events that LAB_SEED draws, where one process that goes along must come to the same
pushes and weights (checks.py). Then for real, in whatever order messages come: that does not repeat, so it is shown,
and held to what holds in any order: nobody starts a step more than LAB_STALENESS ahead of the slowest (`ssp`), the
budget of steps is spent, every update that was pushed counts once, and all ranks end with the server's weights. All
workers together take N x LAB_STEPS steps, who is faster more of them; each weighs its gradient by its share of the
batch, so that as many samples move the weights as far as in `dp`. In the real run a worker may die: the server goes on
with the others, and only what it had under way is lost.

How fast: the compute of each worker is measured, and from it follows what both kinds should reach: T = max T_i in step,
the sum of 1/T_i apart, or less of it in a run that ends (distlab/parameter_server/costs.py).
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from distlab.collectives.costs import wire_tolerance
from distlab.collectives.phases import COMPUTE, Span, recorded, slowed
from distlab.contract import Build
from distlab.lab import Lab
from distlab.measure.tensors import digest_of
from distlab.parameter_server.costs import apart_rate, granted_rate, in_step_rate
from distlab.parameter_server.server import (
    PUSH,
    Client,
    Event,
    Link,
    Local,
    ParameterServer,
    Recorder,
    Remote,
    Scheme,
    Server,
    Threads,
    Worker,
)

from .checks import Audit, audit, prove_asynchronous
from .predictions import weight_bytes

TESTS = "tests/experiments/test_server_asynchronous.py::{}"
PACE = "tests/experiments/test_server_pace.py::test_a_rate_of_some_samples_alone_fails"
RULE_EVENTS = 200  # drawn to try who may start
MOST_STEPS = 5  # of a pace in step
SLOWER = (1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)


@dataclass
class Report:
    """The run of one worker, as it tells it."""

    pushes: int
    steps: int
    compute_s: float  # of all its steps
    seconds: float  # of the whole run
    weights: str  # a digest of its final weights


class Finished(NamedTuple):
    """A real run, as rank 0 knows it."""

    scheme: Scheme
    seen: list[Event]
    audit: Audit
    weights: Tensor  # [P] the server's, at the end
    reports: dict[int, Report]  # of the workers that are still here


def run(
    lab: Lab, schemes: list[Scheme], rules: type[ParameterServer], worker: type[Worker], rates: list["Rate"]
) -> None:
    """Prove what is asked for, then let go of each other under `rules`; `rates` are those of what keeps step."""
    unable = lab.mode.cannot(lab.config)
    wanted = [scheme for scheme in schemes if lab.wants(scheme.name)]
    for name in (scheme.name for scheme in wanted if scheme.name in unable):
        lab.skip(name, unable[name])
    chosen = [scheme for scheme in wanted if scheme.name not in unable]
    names = [scheme.name for scheme in chosen]
    if lab.config.trace and chosen:
        lab.say(f"{', '.join(names)} not profiled: there is no step that all ranks take", "trace")
    links = open_links(lab) if chosen else {}
    for scheme in chosen if lab.config.proof else []:
        prove_asynchronous(lab, links, scheme, rules, worker)
        lab.finished("proof", names)
    finished = [run_freely(lab, links, scheme, rules, worker) for scheme in chosen]
    if lab.rank == 0:
        for each in finished:
            check_run(lab, each, rules)
            if len(each.reports) == lab.world_size and all(report.steps for report in each.reports.values()):
                rates.append(measure_rate(lab, each.scheme, each.reports, each.audit.steps))
        show_rates(lab, rates, schemes)
        show_run(lab, finished)
        if rates or finished:
            lab.say(result(rates, finished), "result", at="normal")


def open_links(lab: Lab) -> dict[int, Link]:
    """At the server a link to each worker, by rank; at a worker its own."""
    at_server, timeout_s = lab.rank == 0, lab.config.collective_timeout_s
    workers = range(1, lab.world_size) if at_server else [lab.rank]
    stores = {worker: dist.PrefixStore(f"link {worker}", lab.exchange.store) for worker in workers}
    return {worker: Link(store, at_server=at_server, timeout_s=timeout_s) for worker, store in stores.items()}


def run_freely(
    lab: Lab, links: dict[int, Link], scheme: Scheme, kind: type[ParameterServer], make_worker: type[Worker]
) -> Finished:
    """One scheme in the order in which messages come; what each rank saw is brought together on rank 0."""
    config, name, dtype = lab.config, scheme.name, getattr(torch, lab.config.dtype)
    lab.at(0, name)
    recorder = Recorder(rank for rank in range(lab.world_size) if rank not in lab.exchange.gone)
    workers = list(recorder.finished)

    def noted(step: int) -> None:
        lab.begin_step(step, name)
        lab.work.reach(sum(recorder.finished.values()))

    worker = make_worker(lab.model(dtype), config, lab.batches(dtype), lab.rank, config.learning_rate, noted=noted)
    rules, client, threads = open_server(lab, links, scheme, kind, recorder, worker)
    lab.say(f"{lab.world_size * config.steps} steps in whatever order they come; workers: {len(workers)}", name)
    with (
        lab.work.of(lab.world_size * config.steps, "steps of all workers"),
        lab.count(calls=False) as traffic,
        recorded(lab.device) as spans,
        slowed(config.slowed_to),
    ):
        seconds = lab.seconds(lambda: worker.train(client, scheme.most))
        if threads is not None:
            threads.join()
    lab.stepped()
    report = Report(len(worker.samples), worker.steps, compute_s(spans), seconds, digest_of([worker.vectors.weights]))
    everyone = lab.exchange.everyone(f"reports of {name}", asdict(report))
    reports = {rank: Report(**of_rank) for rank, of_rank in enumerate(everyone) if of_rank is not None}
    if traffic.wire_error is None:
        compare_bytes(lab, name, reports, traffic.wire_bytes)
    seen = audit(recorder.seen, workers)
    note_versions(lab, name, report, seen)
    return Finished(scheme, recorder.seen, seen, rules.weights, reports)


def note_versions(lab: Lab, name: str, report: Report, seen: Audit) -> None:
    """In each worker's own log: which versions of the weights it computed with, and how stale its updates were."""
    by_worker = {str(worker): pairs for worker, pairs in seen.versions.items()}
    own = lab.exchange.share(f"versions of {name}", by_worker).get(str(lab.rank), [])
    first = ", ".join(f"{taken}>{pushed}" for taken, pushed in own[:6]) + (", ..." if len(own) > 6 else "")
    stale = [pushed - taken for taken, pushed in own] or [0]
    lab.note(
        "versions",
        f"{name}: {report.steps} steps in {report.pushes} updates, version of the weights fetched>updated: {first};"
        f" staleness {fmean(stale):.2f} in the mean, {max(stale)} at most",
    )


def compare_bytes(lab: Lab, name: str, reports: Mapping[int, Report], wire_bytes: float) -> None:
    """Pushes of this worker, or at the server fetches of the others, beside what was sent."""
    if len(reports) < lab.world_size:
        lab.waive("wire bytes of the run", "a worker has left", name)
        return
    fetches = sum(report.pushes + 1 for rank, report in reports.items() if rank)
    sent = reports[lab.rank].pushes if lab.rank else fetches
    predicted = sent * weight_bytes(lab.config)
    tolerance = wire_tolerance(predicted, 4 * sent + 4) if lab.world_size > 1 else 0.0
    formula = "fetches of others x S" if lab.rank == 0 else "pushes x S"
    lab.compare(
        "wire bytes of the run", predicted, wire_bytes, "B", tolerance, name, formula,
        control="tests/experiments/test_server.py::test_bytes_that_nobody_asked_for_fail_by_name",
    )  # fmt: skip


def open_server(
    lab: Lab, links: dict[int, Link], scheme: Scheme, kind: type[ParameterServer], recorder: Recorder, worker: Worker
) -> tuple[ParameterServer, Client, Threads | None]:
    """The rules, and this rank's client; on rank 0 the server too, which hears of every worker that leaves."""
    config, weights, workers = lab.config, worker.vectors.weights, list(recorder.finished)
    budget, start = lab.world_size * config.steps, weights.cpu().clone()
    rules = kind(start, workers, lr=config.learning_rate, budget=budget, staleness=scheme.staleness)
    server = Server(rules, config.collective_timeout_s, recorder)
    lab.hooks.let_leave(server.leave)
    if lab.rank > 0:
        return rules, Remote(links[lab.rank], weights), None
    for rank in lab.exchange.gone & set(workers):  # it left while the server was made
        server.leave(rank)
    return rules, Local(server, 0), Threads(server, {rank: links[rank] for rank in workers if rank})


# --- what holds in any order ---


def check_run(lab: Lab, run: Finished, kind: type[ParameterServer]) -> None:
    """Check a real run by its events and by the workers that are still here; its rules, of `kind`, are tried too."""

    def hold(check: str, wrong: int, detail: str, control: str) -> None:
        lab.check(check, wrong, 0, run.scheme.name, detail, control=TESTS.format(control))

    seen, bound, budget = run.audit, run.scheme.staleness, lab.world_size * lab.config.steps
    if bound is not None:
        detail = "finished steps that a worker was ahead of the slowest when it started one, at most"
        lab.check("staleness", seen.lead, bound, run.scheme.name, detail)
    hold(
        "who may start", misjudged(kind, lab.world_size, bound, lab.config.seed),
        f"{RULE_EVENTS} drawn events: workers that the server lets start and the bound does not, or the other way",
        "test_the_rules_let_start_whom_the_bound_lets",
    )  # fmt: skip
    hold(
        "budget", abs(seen.granted - budget),
        f"{seen.granted} steps were granted, of {budget} that all workers have together",
        "test_a_server_that_grants_more_than_its_budget_fails_by_name",
    )  # fmt: skip
    hold(
        "updates", miscounted(seen, run.reports),
        f"{len(seen.staleness)} applied; difference: those of workers still here that did not count exactly once",
        "test_an_update_that_does_not_count_once_fails_by_name",
    )  # fmt: skip
    hold(
        "final weights", sum(report.weights != digest_of([run.weights]) for report in run.reports.values()),
        "ranks that ended with other weights than the server", "test_a_worker_that_keeps_its_own_weights_fails_by_name",
    )  # fmt: skip


def miscounted(seen: Audit, reports: Mapping[int, Report]) -> int:
    """Updates that were not applied once, in their worker's order; and steps that went missing."""
    wrong = seen.wrong_numbers
    for rank, report in reports.items():
        wrong += abs(report.pushes - len(seen.steps[rank])) + abs(report.steps - sum(seen.steps[rank]))
    return wrong


def misjudged(kind: type[ParameterServer], workers: int, staleness: int | None, seed: int) -> int:
    """How often rules of `kind` and the bound disagree about who may start, over events drawn by `seed`.

    Who has finished c steps may start another if the slowest has finished c - staleness at least (Ho et al. 2013,
    section 2). The last worker is slow, and leaves halfway.
    """
    rules = kind(torch.zeros(1), range(workers), lr=0.0, budget=2 * RULE_EVENTS, staleness=staleness)
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


# --- how fast ---


@dataclass(frozen=True)
class Rate:
    """Samples a second of one variant; predicted from the compute of its workers, as if messages took no time."""

    variant: str
    compute_s: list[float]  # of a step, by rank
    predicted: float
    measured: float


def in_step(lab: Lab, names: list[str]) -> list[Rate]:
    """A few steps more of each of these variants, timed as a whole; on every rank."""
    chosen = [each for each in lab.mode.variants if each.name in names]
    return [rate_in_step(lab, each.name, each.build) for each in chosen if each.build is not None]


def rate_in_step(lab: Lab, name: str, build: Build) -> Rate:
    """Train what `build` makes for some steps, this rank at its own speed."""
    dtype, steps = getattr(torch, lab.config.dtype), min(lab.config.steps, MOST_STEPS)
    lab.at(0, f"the pace of {name}")
    batches = lab.batches(dtype)
    strategy = build(lab.model(dtype), lab.mesh, lab.config)
    shards = iter([lab.dealt(batches, step) for step in range(steps)])

    def step() -> None:
        strategy.backward(next(shards))
        strategy.update()

    with recorded(lab.device) as spans, slowed(lab.config.slowed_to):
        seconds = lab.seconds(step, repeats=steps)
    everyone = lab.exchange.everyone(f"pace of {name}", [compute_s(spans) / steps, seconds])
    computed, walls = ([of_rank[index] for of_rank in everyone] for index in (0, 1))
    samples = samples_of(lab)
    rate = Rate(name, computed, in_step_rate(samples, computed), sum(samples) / max(walls))
    if lab.rank == 0:
        check_rate(lab, rate, lab.config.batch, walls)
    return rate


def check_rate(lab: Lab, rate: Rate, samples: int, seconds: Sequence[float]) -> None:
    """In as long as the slowest took, of all workers' `seconds`, the rate comes to the `samples` of all."""
    least, most = (rate.measured * each(seconds) for each in (min, max))
    off = abs(most - samples) + max(0.0, least - samples)
    detail = f"{rate.measured:.4g} a second in {max(seconds):.4g} s, of {samples} samples"
    lab.check("samples of the pace", off, 1e-9 * samples, variant=rate.variant, detail=detail, control=PACE)


def compute_s(spans: list[Span]) -> float:
    """Seconds of forward and backward passes."""
    return sum(span.end_s - span.start_s for span in spans if span.kind in COMPUTE)


def samples_of(lab: Lab) -> list[int]:
    batches = lab.batches(torch.float32)
    sizes = [len(batches.sample_ids(0, rank, lab.world_size)) for rank in range(lab.world_size)]
    assert sum(sizes) == lab.config.batch
    return sizes


def measure_rate(lab: Lab, scheme: Scheme, reports: Mapping[int, Report], pushed: Mapping[int, Sequence[int]]) -> Rate:
    """The rate of a scheme that does not wait, or not before its bound; `pushed` are the steps of each push, by worker,
    as they were recorded at the server."""
    step_s = [report.compute_s / max(1, report.steps) for report in reports.values()]
    budget, samples = lab.world_size * lab.config.steps, samples_of(lab)
    reached = granted_rate(samples, step_s, budget, most=scheme.most, staleness=scheme.staleness)
    done = sum(number * report.steps for number, report in zip(samples, reports.values(), strict=True))
    rate = Rate(scheme.name, step_s, reached, done / max(report.seconds for report in reports.values()))
    seen = sum(number * sum(pushed[rank]) for rank, number in enumerate(samples))
    check_rate(lab, rate, seen, [report.seconds for report in reports.values()])
    return rate


def show_rates(lab: Lab, rates: list[Rate], schemes: list[Scheme]) -> None:
    if not rates:
        return
    for rate in rates:
        lab.compare(
            "samples a second", rate.predicted, rate.measured, "samples/s", variant=rate.variant,
            formula="from the compute alone", shown="a time",
        )  # fmt: skip
    columns = ["", *(f"rank {rank} (ms a step)" for rank in range(lab.world_size)), "predicted samples/s", "measured"]
    rows = [
        [rate.variant, *(f"{each * 1000:.1f}" for each in rate.compute_s), rate.predicted, rate.measured]
        for rate in rates
    ]
    lab.table("Samples a second, from the compute of each worker and as measured", columns, rows)
    curves = stragglers(lab, rates, schemes)
    lab.chart("Samples a second with one straggler", "times slower", "samples a second", curves)


def stragglers(lab: Lab, rates: list[Rate], schemes: list[Scheme]) -> dict[str, list[list[float]]]:
    """Predicted curves over how much slower one rank is where all else compute alike, and this run's points on them."""
    named, _, left = (lab.config.slow_rank or f"{lab.world_size - 1}:1").partition(":")
    slow, share = int(named), float(left)  # which rank is slowed, to which share of its speed
    # What the slowed rank takes longer is on the x axis: in the median it would count twice.
    alike_s = median(
        seconds * (share if rank == slow else 1.0) for rate in rates for rank, seconds in enumerate(rate.compute_s)
    )
    slower = sorted({*SLOWER, 1 / share})
    series: dict[str, list[list[float]]] = {}
    for times in slower:
        step_s = [alike_s * (times if rank == slow else 1.0) for rank in range(lab.world_size)]
        for name, value in predicted_rates(lab, step_s, schemes).items():
            series.setdefault(name, [slower, []])[1].append(value)
    return series | {f"{rate.variant}, measured": [[1 / share], [rate.measured]] for rate in rates}


def predicted_rates(lab: Lab, step_s: list[float], schemes: list[Scheme]) -> dict[str, float]:
    """Samples a second by way of waiting, of workers that take `step_s` a step; the last is of a run without end."""
    samples, budget = samples_of(lab), lab.world_size * lab.config.steps
    bounded, unbounded = schemes
    return {
        "in step": in_step_rate(samples, step_s),
        f"apart, at most {bounded.staleness} ahead": granted_rate(samples, step_s, budget, staleness=bounded.staleness),
        f"apart, {unbounded.most} steps at a time": granted_rate(samples, step_s, budget, most=unbounded.most),
        "apart, in the long run": apart_rate(samples, step_s),
    }


def show_run(lab: Lab, finished: list[Finished]) -> None:
    """What the server saw, by worker, and the loss over the samples that had moved the weights."""
    rows = []
    for each in finished:
        steps = ", ".join(str(sum(of_worker)) for of_worker in each.audit.steps.values())
        stale = each.audit.staleness
        mean = f"{sum(stale) / max(1, len(stale)):.2f}"
        rows.append([each.scheme.name, steps, len(stale), mean, max(stale, default=0), each.audit.lead])
    columns = ["", "steps by worker", "updates", "mean staleness", "largest", "largest lead in steps"]
    if rows:
        lab.table("What the server saw: staleness is the updates of others between a fetch and its push", columns, rows)
        curves = {each.scheme.name: smoothed(each.seen, lab.world_size) for each in finished}
        title = "Loss of the asynchronous runs, at the weights that each worker had"
        lab.chart(title, "updates applied", "loss", curves)


def result(rates: Sequence[Rate], finished: Sequence[Finished]) -> str:
    """How fast each variant was, and how stale the updates of those that do not wait, in a line."""
    fast = ", ".join(f"{rate.variant} {rate.measured:.4g}" for rate in rates)
    stale = ", ".join(f"{each.scheme.name} {fmean(each.audit.staleness or [0]):.2f}" for each in finished)
    told = {"samples/s": fast, "mean staleness": stale}
    return "; ".join(f"{what}: {values}" for what, values in told.items() if values)


def smoothed(seen: list[Event], num_workers: int) -> list[list[float]]:
    """The losses of the pushes in the order in which they were applied, in means of as many as there are workers."""
    losses = [event.loss for event in seen if event.kind == PUSH]
    ends = range(1, len(losses) + 1)
    return [[float(end - 1) for end in ends], [fmean(losses[max(0, end - num_workers) : end]) for end in ends]]
