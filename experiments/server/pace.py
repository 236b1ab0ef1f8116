"""How fast: samples a second where workers wait for each other and where they do not, with a straggler or without.

The compute of each worker is measured, and from it follows what both kinds should reach: T = max T_i in step, the sum
of 1/T_i apart, or less of it in a run that ends (workers/measure/formulas/grants.py).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import torch

from experiments.server.promises import Report
from experiments.server.worker import Scheme
from workers.config import Config
from workers.contract import Build
from workers.lab import Lab
from workers.measure.formulas.grants import granted_rate
from workers.measure.formulas.server import apart_rate, in_step_rate
from workers.parallel.phases import COMPUTE, Span, recorded, slowed

CONTROL = "tests/experiments/test_server_pace.py::test_a_rate_of_some_samples_alone_fails"
MOST_STEPS = 5
SLOWER = (1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)


@dataclass(frozen=True)
class Rate:
    """Samples a second of one variant; predicted from the compute of its workers, as if messages took no time."""

    variant: str
    compute_s: list[float]  # of a step, by rank
    predicted: float
    measured: float


def in_step(lab: Lab, names: list[str]) -> list[Rate]:
    """A few steps more of each of these variants, timed as a whole; on every rank."""
    return [
        rate_in_step(lab, each.name, each.build)
        for each in lab.mode.variants
        if each.name in names and each.build is not None
    ]


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

    with recorded() as spans, slowed(lab.config.slowed_to):
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
    lab.check("samples of the pace", off, 1e-9 * samples, variant=rate.variant, detail=detail, control=CONTROL)


def compute_s(spans: list[Span]) -> float:
    """Seconds of forward and backward passes."""
    return sum(span.end_s - span.start_s for span in spans if span.kind in COMPUTE)


def samples_of(lab: Lab) -> list[int]:
    """The samples of a step, by rank."""
    batches = lab.batches(torch.float32)
    sizes = [len(batches.sample_ids(0, rank, lab.world_size)) for rank in range(lab.world_size)]
    assert sum(sizes) == lab.config.batch
    return sizes


def apart(lab: Lab, scheme: Scheme, reports: dict[int, Report], pushed: Mapping[int, Sequence[int]]) -> Rate:
    """The rate of a scheme that does not wait, or not before its bound; `pushed` are the steps of each push, by worker,
    as the witness saw them."""
    step_s = [report.compute_s / max(1, report.steps) for report in reports.values()]
    budget, samples = lab.world_size * lab.config.steps, samples_of(lab)
    reached = granted_rate(samples, step_s, budget, most=scheme.most, staleness=scheme.staleness)
    done = sum(number * report.steps for number, report in zip(samples, reports.values(), strict=True))
    rate = Rate(scheme.name, step_s, reached, done / max(report.seconds for report in reports.values()))
    seen = sum(number * sum(pushed[rank]) for rank, number in enumerate(samples))
    check_rate(lab, rate, seen, [report.seconds for report in reports.values()])
    return rate


def show_rates(lab: Lab, rates: list[Rate], schemes: list[Scheme]) -> None:
    """Predicted beside measured, and what a straggler would cost each kind."""
    if not rates:
        return
    rows: list[list[object]] = []
    for rate in rates:
        rows.append(
            [rate.variant, *(f"{seconds * 1000:.1f}" for seconds in rate.compute_s), rate.predicted, rate.measured]
        )
        lab.compare(
            "samples a second", rate.predicted, rate.measured, "samples/s", variant=rate.variant,
            formula="from the compute alone", shown="a time",
        )  # fmt: skip
    columns = ["", *(f"rank {rank} (ms a step)" for rank in range(lab.world_size)), "predicted samples/s", "measured"]
    lab.table("Samples a second, from the compute of each worker and as measured", columns, rows)
    lab.chart(
        "Samples a second with one straggler", "times slower", "samples a second", stragglers(lab, rates, schemes)
    )


def stragglers(lab: Lab, rates: list[Rate], schemes: list[Scheme]) -> dict[str, list[list[float]]]:
    """Predicted curves over how much slower one rank is where all else compute alike, and this run's points on them."""
    slow, share = straggler(lab.config)
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


def straggler(config: Config) -> tuple[int, float]:
    """The rank that LAB_SLOW_RANK slows and the share left of its speed; the last one, at all its speed, if unset."""
    rank, _, share = (config.slow_rank or f"{config.world_size - 1}:1").partition(":")
    return int(rank), float(share)


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
