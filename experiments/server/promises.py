"""What a real asynchronous run is held to, in whatever order its events came.

The server's word counts for nothing: the order, the weights that each worker was to have, and what every update makes
of them are the witness's (witness.py), the samples and gradients those of one process (replay.py).
"""

import hashlib
import math
import random
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from experiments.server.reference import OneProcess
from experiments.server.replay import misdealt, recomputed, rounding
from experiments.server.witness import Audit, Witness
from experiments.server.worker import Scheme
from workers.lab import Lab
from workers.parallel.parameter_server import START, ParameterServer

TESTS = "tests/experiments/test_server_replay.py"
BUDGET_CONTROL = f"{TESTS}::test_a_server_that_grants_more_than_its_budget_fails_by_name"
RULE_EVENTS = 200  # drawn to try who may start


@dataclass
class Report:
    """What one worker says of its own run."""

    fetched: list[float]  # checksums of the weights that it began its pushes from
    sent: list[float]  # checksums of the updates that it pushed, in order
    samples: list[str]  # and digests of the samples behind them
    steps: int
    compute_s: float  # of all its steps
    seconds: float  # of the whole run
    weights: str  # a digest of its final weights


class Finished(NamedTuple):
    """A real run, as rank 0 knows it."""

    scheme: Scheme
    witness: Witness
    seen: Audit
    weights: Tensor  # [P] the server's, at the end
    reports: dict[int, Report]  # of the workers that are still here


def hold(lab: Lab, run: Finished, kind: type[ParameterServer]) -> None:
    """Check what the server did and what the workers say that are still here; its rules, of `kind`, are tried too."""
    name, seen, reports = run.scheme.name, run.seen, run.reports
    if run.scheme.staleness is not None:
        detail = "finished steps that a worker was ahead of the slowest when it started one, at most"
        lab.check("staleness", seen.lead, run.scheme.staleness, variant=name, detail=detail)
    detail = f"{RULE_EVENTS} drawn events: workers that the server lets start and the bound does not, or the other way"
    wrong = misjudged(kind, lab.world_size, run.scheme.staleness, lab.config.seed)
    control = f"{TESTS}::test_the_rules_let_start_whom_the_bound_lets"
    lab.check("who may start", wrong, 0, variant=name, detail=detail, control=control)
    sent = sum(len(report.sent) for report in reports.values())
    detail = (
        f"{sent} sent by those still here, {len(seen.staleness)} applied; difference: those not applied exactly once"
    )
    control = f"{TESTS}::test_an_update_that_is_changed_on_its_way_fails_by_name"
    lab.check("updates", miscounted(seen, reports), 0, variant=name, detail=detail, control=control)
    granted, budget = granted_steps(run.witness), lab.world_size * lab.config.steps
    detail = f"{granted} steps were granted, of {budget} that all workers have together"
    lab.check("budget", abs(granted - budget), 0, variant=name, detail=detail, control=BUDGET_CONTROL)
    detail = "pushes that began from other weights than those of all updates before"
    lab.check("fetched weights", misfetched(seen, reports), 0, variant=name, detail=detail)
    off = (run.weights - run.witness.weights).abs().max().item()
    detail = f"of the server, from its witness's after {len(seen.staleness)} updates of w - lr x update"
    lab.check("weights of the run", off, 0, variant=name, detail=detail)
    control = f"{TESTS}::test_a_rank_that_ends_with_other_weights_fails_by_name"
    differing = unlike(run.witness, reports)
    detail = "ranks that ended with other weights than the witness"
    lab.check("final weights", differing, 0, variant=name, detail=detail, control=control)
    replay(lab, run)


def granted_steps(witness: Witness) -> int:
    """Steps that the server let anybody begin."""
    return sum(event.steps for event in witness.seen if event.kind == START)


def replay(lab: Lab, run: Finished) -> None:
    """Samples of all pushes and gradients of some, against one process."""
    config, dtype, name = lab.config, getattr(torch, lab.config.dtype), run.scheme.name
    one = OneProcess(lab.model(dtype), config, proof=False, device=lab.device, dtype=dtype)
    wrong = 0
    for rank, report in run.reports.items():
        steps = run.seen.steps[rank]
        spans = [(sum(steps[:index]), number) for index, number in enumerate(steps)]
        wrong += misdealt(one, rank, spans, report.samples)
    pushes = sum(len(report.samples) for report in run.reports.values())
    detail = f"of {pushes} pushes, those of other samples than (seed, step, rank) give"
    lab.check("samples of the run", wrong, 0, variant=name, detail=detail)
    if not config.proof:
        lab.say(f"gradients of {name} not computed again: LAB_PROOF=0", name)
        return
    lab.at(0, f"replay of {name}")
    kept = run.witness.kept
    detail = (
        f"{len(kept)} of {len(run.seen.staleness)} pushes computed again by one process: the first of each worker and"
        " more by LAB_SEED; length of the difference over that of its own; tolerance: rounding"
    )
    tolerance = rounding(dtype, config.depth, config.num_microbatches, max((push.steps for push in kept), default=1))
    worst = recomputed(one, kept, config.learning_rate)
    lab.check("gradients of the run", worst, tolerance, variant=name, detail=detail)


def unlike(witness: Witness, reports: dict[int, Report]) -> int:
    """Ranks that ended with other weights."""
    return sum(report.weights != digest(witness.weights) for report in reports.values())


def miscounted(seen: Audit, reports: dict[int, Report]) -> int:
    """Updates not applied once, in their worker's order, with the numbers that it sent; and steps that went missing."""
    wrong = seen.wrong_numbers
    for rank, report in reports.items():
        wrong += differing(report.sent, seen.pushed[rank]) + abs(report.steps - sum(seen.steps[rank]))
    return wrong


def misfetched(seen: Audit, reports: dict[int, Report]) -> int:
    """Pushes of those still here that began from other weights than the witness's."""
    return sum(differing(report.fetched, seen.fetched[rank]) for rank, report in reports.items())


def differing(some: list[float], others: list[float]) -> int:
    """Checksums that are not the same; a sum may depend on the device that adds up."""
    apart = sum(
        not math.isclose(one, other, rel_tol=1e-9, abs_tol=1e-12) for one, other in zip(some, others, strict=False)
    )
    return apart + abs(len(some) - len(others))


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


def digest(weights: Tensor) -> str:
    """The sha256 of weights, wherever they are."""
    return hashlib.sha256(weights.cpu().view(torch.uint8).numpy().data).hexdigest()
