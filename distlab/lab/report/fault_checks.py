"""Drills: of each fault that was planned, what should have come of it and what did, from the records alone.

    lost      every survivor names the rank, in the same sentence, within the bound, and ends with 3; or, where ranks
              may leave, the others go on without it
    broken    every survivor names the rank as an end of a broken link, and ends with 3: who hears nobody and is heard
              may be either end of it
    survived  nobody is lost by it
    full      every rank ends with 1 and the sentence of a disk that is full
    refused   a look such as a resumed run takes passes the damaged checkpoint over, and names the file
    named     the audit of that step, or the first one after it, names rank and tensor; of two holders, both
    seen      a check of the timed steps fails, or one that the mode names: no rank holds a copy of what was changed
    unseen    nothing, since it was not made: no check of these settings could see it
    open      either: a pause that ends about when it would be named

A drill is no verdict of its own: a killed rank ends a run with 3 as any loss does. `held` is None where the fault did
not come, because the run had ended.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from distlab.lab.report.records import (
    Corrupted,
    Failed,
    Injected,
    Left,
    Lost,
    Planned,
    Ranks,
    Refused,
    Run,
    Start,
    select,
)

CONTROL = "tests/lab/report/test_drills.py::test_a_drill_that_did_not_come_as_planned_does_not_hold"
LOST_CODE, FULL_CODE = 3, 1
FULL = "cannot be written any more"
WATCHED = ("audited replicas", "audited loss", "audited weights", "audited optimizer", "timed losses", "timed replicas")
SHOULD = {
    "lost": "named by every survivor within {bound:g} s, exit code 3",
    "broken": "named as an end of a broken link within {bound:g} s, exit code 3",
    "survived": "nobody lost",
    "full": "one error sentence, exit code 1",
    "refused": "the damaged checkpoint passed over by name",
    "named": "named by rank and tensor",
    "seen": "a check of the {steps} fails",
    "unseen": "nothing: no check could detect it",
    "open": "survived, or named",
}


class Case(NamedTuple):
    """One fault that was made, and all that can tell what came of it."""

    records: Ranks
    checks: Sequence[Run]  # of the run, merged over ranks
    plan: Planned
    made: Injected


def drills(records: Ranks, checks: Sequence[Run]) -> list[Run]:
    """An entry a planned fault, of flipped bits one a variant: event, should, did, held."""
    planned = {each.number: each for _, each in select(records, Planned)}
    made = [each for _, each in select(records, Injected)]
    entries = []
    for number, plan in sorted(planned.items()):
        cases = [Case(records, checks, plan, each) for each in made if each.number == number]
        entries += [_entry(case) for case in cases] or [_missing(records, plan)]
    return entries


def fault_sentence(drill: Run) -> str:
    """A drill in a line."""
    how = {True: "as expected", False: f"expected: {drill['should']}", None: "nothing to check"}[drill["held"]]
    return f"{drill['event']}: {drill['did']} ({how})"


def _entry(case: Case) -> Run:
    plan, made = case.plan, case.made
    outcome = made.outcome or plan.outcome
    event = f"{plan.event} in {made.variant}" if made.variant and outcome in ("named", "seen", "unseen") else plan.event
    held, did = _JUDGES[outcome](case)
    return {"event": event, "detail": made.detail, "should": _should(plan, outcome), "did": did, "held": held}


def _missing(records: Ranks, plan: Planned) -> Run:
    """A fault that did not come: no wonder where the run broke before, or its second was after the end."""
    excused = plan.step is None or any(True for _ in select(records, Failed))
    did, held = "did not occur", None if excused else False
    return {"event": plan.event, "detail": "", "should": _should(plan, plan.outcome), "did": did, "held": held}


def _should(plan: Planned, outcome: str) -> str:
    return SHOULD[outcome].format(bound=plan.bound_s, steps="training" if plan.checks else "timed steps")


# Each judge says whether what should have come of the fault did, and what came of it.


def _lost(case: Case) -> tuple[bool, str]:
    rank = case.plan.rank
    if any(each.rank == rank for _, each in select(case.records, Left)):
        return True, f"rank {rank} left, and the remaining ranks continued"
    ends = list({of: end for of, end in select(case.records, Failed) if of != rank}.values())
    if not ends:
        return False, "nobody was named"
    said = {end.error for end in ends}
    codes = sorted({end.exit_code for end in ends})
    took_s = max(end.at for end in ends) - case.made.at
    apart = _apart(case)
    named = apart or all(f"rank {rank} " in each or f"rank {rank}:" in each for each in said)
    held = named and (apart or len(said) == 1) and codes == [LOST_CODE] and took_s <= case.plan.bound_s
    whom = f"rank {rank} named" if named else "another named"
    return held, f"{whom} by {len(ends)} after {took_s:.1f} s, exit code {', '.join(map(str, codes))}: {min(said)}"


def _apart(case: Case) -> bool:
    """A cut between two ranks alone: each side names the other."""
    (start, *_) = (each for _, each in select(case.records, Start))
    return case.plan.kind == "cut" and start.world_size == 2 and any(True for _ in select(case.records, Lost))


def _survived(case: Case) -> tuple[bool, str]:
    gone = [each.reason for _, each in select(case.records, Lost) if each.rank == case.plan.rank]
    gone += [each.reason for _, each in select(case.records, Left) if each.rank == case.plan.rank]
    return not gone, f"rank {case.plan.rank} was lost: {gone[0]}" if gone else "nobody was lost by it"


def _full(case: Case) -> tuple[bool, str]:
    ends = [end for _, end in select(case.records, Failed)]
    said = {end.error for end in ends}
    held = len(said) == 1 and FULL in min(said) and {end.exit_code for end in ends} == {FULL_CODE}
    return held, "; ".join(sorted(said)) or "no rank reported it"


def _refused(case: Case) -> tuple[bool, str]:
    said = [each.sentence for _, each in select(case.records, Refused) if each.number == case.plan.number]
    folder, _, file = case.made.detail.partition("/")
    held = bool(said) and f"{folder} is damaged ({file}" in said[0]
    return held, said[0] if said else "it was taken"


def _named(case: Case) -> tuple[bool, str]:
    plan, made = case.plan, case.made
    found = [each for _, each in select(case.records, Corrupted) if each.variant == made.variant]
    if not found:
        return False, "nothing differed"
    tensor = made.detail.partition("[")[0]
    right = [each for each in found if each.tensor == tensor and 0 <= each.step - made.step < plan.bound_s]
    first = (right or found)[0]
    right_rank = first.ranks == [plan.rank] if first.majority else plan.rank in first.ranks
    who = f"rank{'s' * (len(first.ranks) > 1)} {', '.join(map(str, first.ranks))}"
    return bool(right) and right_rank, f"{who} named with {first.tensor} at step {first.step}"


def _seen(case: Case) -> tuple[bool, str]:
    watched = case.plan.checks or WATCHED
    of_variant = [check for check in case.checks if check["variant"] == case.made.variant and not check["passed"]]
    failed = [check["name"] for check in of_variant if check["name"] in watched]
    return bool(failed), f"{' and '.join(failed)} failed" if failed else "no check failed"


_JUDGES: dict[str, Callable[[Case], tuple[bool | None, str]]] = {
    "lost": _lost,
    "broken": _lost,
    "survived": _survived,
    "full": _full,
    "refused": _refused,
    "named": _named,
    "seen": _seen,
    "unseen": lambda _: (None, "not made"),
    "open": lambda case: (None, _survived(case)[1]),
}
