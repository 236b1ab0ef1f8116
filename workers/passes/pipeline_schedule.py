"""A schedule as it ran, held against its rules and against its formula.

The order of each rank keeps the rules of its schedule (pipeline_order.py). The orders of all ranks of a pipeline, put
on paper with passes of one length, idle for what the formula says: an order that keeps all rules and waits where it
need not is found so. On a mesh each row of ranks along pp is a pipeline of its own.
"""

from typing import Any, NamedTuple

from workers.lab import Lab
from workers.measure.formulas.pipelines import idle_share
from workers.measure.order import Order
from workers.parallel.schedules import Action, Kind, stages_of
from workers.parallel.simulation import simulate
from workers.passes.pipeline_order import Pass, broken, passes

CONTROL = "tests/workers/passes/test_pipeline_schedule.py::"
THIRDS: dict[Kind, float] = {
    "forward": 1,
    "input": 1,
    "weight": 1,
    "backward": 2,
}  # of a microbatch's work on one stage


class Piped(NamedTuple):
    """What the pipelines of a variant should do."""

    schedule: str
    microbatches: int
    owners: list[int]  # the rank along pp of each stage
    in_one: bool = False  # backward passes are in one, though the schedule splits them


def check_schedule(lab: Lab, name: str, order: Order, piped: Piped) -> list[Pass]:
    """The passes come in the order of the schedule, and idle no more than its formula; a collective of all ranks.

    Returns this rank's passes, none if it breaks a rule.
    """
    place, ranks = lab.mesh.index("pp"), lab.mesh.size("pp")
    done, chunks = passes(order), len(stages_of(place, piped.owners))
    faults = broken(piped.schedule, done, place, ranks, piped.microbatches, chunks, in_one=piped.in_one)
    detail = "; ".join(faults) or f"{len(done)} passes in the order of {piped.schedule}"
    lab.check("schedule", len(faults), 0, name, detail, control=f"{CONTROL}test_passes_out_of_order_fail")
    kept = [] if faults else done
    everyone = along_pp(lab, name, kept)
    if all(everyone):
        check_on_paper(lab, name, everyone, piped)
    return kept


def along_pp(lab: Lab, name: str, done: list[Pass]) -> list[list[Any]]:
    """The passes of all ranks of this rank's pipeline, by their place in it."""
    row = [lab.mesh.index(axis) for axis in lab.mesh.groups if axis != "pp"]
    everyone = lab.exchange.everyone(f"order of {name}", [row, done])
    return [theirs for of_row, theirs in everyone if of_row == row]


def check_on_paper(lab: Lab, name: str, everyone: list[list[Any]], piped: Piped) -> None:
    """What ran on all ranks, with passes of one length and messages of none, idles as long as the formula says."""
    owners, ranks = piped.owners, len(everyone)
    ran = [
        [Action(kind, stages_of(rank, owners)[chunk], mb) for kind, chunk, mb in done]
        for rank, done in enumerate(everyone)
    ]
    spans = simulate(ran, THIRDS)
    length = max(own[-1].end_s for own in spans)
    idle = 1 - sum(span.end_s - span.start_s for own in spans for span in own) / (length * ranks)
    share = idle_share(piped.schedule, ranks, piped.microbatches, len(owners) // ranks, in_one=piped.in_one)
    detail = f"{idle:.3f} idle as it ran, {share:.3f} by formula"
    lab.check(
        "bubble on paper", abs(idle - share), 1e-9, name, detail, control=f"{CONTROL}test_an_order_that_waits_fails"
    )
