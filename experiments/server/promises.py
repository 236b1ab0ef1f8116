"""What a real asynchronous run is held to: nothing that depends on the order in which messages came."""

import math
from dataclasses import dataclass

from experiments.server.worker import Scheme
from workers.lab import Lab
from workers.parallel.parameter_server import Audit


@dataclass
class Report:
    """What one worker says of its own run."""

    sent: list[float]  # checksums of the updates that it pushed, in order
    steps: int
    compute_s: float  # of all its steps
    seconds: float  # of the whole run
    weights: str  # a digest of its final weights


def hold(lab: Lab, scheme: Scheme, seen: Audit, reports: dict[int, Report]) -> None:
    """Check the server's history `seen` against what the workers say that are still here."""
    if scheme.staleness is not None:
        detail = "finished steps that a worker was ahead of the slowest when it started one, at most"
        lab.check("staleness", seen.lead, scheme.staleness, variant=scheme.name, detail=detail)
    sent = sum(len(report.sent) for report in reports.values())
    detail = (
        f"{sent} sent by those still here, {len(seen.staleness)} applied; difference: those not applied exactly once"
    )
    lab.check("updates", miscounted(seen, reports), 0, variant=scheme.name, detail=detail)
    differing = len({report.weights for report in reports.values()}) - 1
    lab.check(
        "final weights", differing, 0, variant=scheme.name, detail="ranks that ended with other weights than rank 0"
    )


def miscounted(seen: Audit, reports: dict[int, Report]) -> int:
    """Updates not applied once, in their worker's order, with the numbers that it sent; and steps that went missing."""
    wrong = seen.wrong_numbers
    for rank, report in reports.items():
        applied = seen.checksums[rank]
        wrong += abs(len(report.sent) - len(applied)) + abs(report.steps - seen.steps[rank])
        wrong += sum(
            not math.isclose(one, other, rel_tol=1e-9, abs_tol=1e-12)
            for one, other in zip(report.sent, applied, strict=False)
        )
    return wrong
