"""Fault tests: the expected and the observed effect of each planned fault, from the records alone.

    lost      every survivor names the rank, in the same sentence and in time, and ends with 3; or, if ranks may
              leave, the others continue without it
    broken    every survivor names the rank as an end of a broken link, and ends with 3: without heartbeats in both
              directions, either end may be at fault
    survived  no rank is lost
    full      every rank ends with 1 and a sentence about the full disk
    open      either: a pause about as long as the limit

They do not decide the verdict: a killed rank ends a run with 3 like any lost rank. `held` is None if there is nothing
to check: the fault did not occur before the run's end, or an older lab planned it and it is no longer checked.
"""

from collections.abc import Callable
from typing import NamedTuple

from distlab.lab.report.records import Failed, Injected, Left, Lost, Planned, Ranks, Run, Start, select

CONTROL = "tests/lab/report/test_drills.py::test_a_fault_that_never_came"
LOST_CODE, FULL_CODE = 3, 1
FULL = "cannot be written any more"
SHOULD = {
    "lost": "named by every survivor within {bound:g} s, exit code 3",
    "broken": "named as an end of a broken link within {bound:g} s, exit code 3",
    "survived": "no rank is lost",
    "full": "one error sentence, exit code 1",
    "open": "survived, or named",
}


class Case(NamedTuple):
    """A fault that was injected, and all records about its effect."""

    records: Ranks
    plan: Planned
    made: Injected


def drills(records: Ranks) -> list[Run]:
    """Return one entry per planned fault: event, should, did, held."""
    planned = {each.number: each for _, each in select(records, Planned)}
    made = {each.number: each for _, each in select(records, Injected)}
    entries = []
    for number, plan in sorted(planned.items()):
        judge = _JUDGES.get(plan.outcome, _not_judged)
        case = Case(records, plan, made[number]) if number in made else None
        held, did = judge(case) if case is not None else _missing(records, plan)
        should = SHOULD.get(plan.outcome, plan.outcome).format(bound=plan.bound_s)
        detail = case.made.detail if case is not None else ""
        entries.append({"event": plan.event, "detail": detail, "should": should, "did": did, "held": held})
    return entries


def fault_sentence(drill: Run) -> str:
    """Return a fault test as one line."""
    how = {True: "as expected", False: f"expected: {drill['should']}", None: "nothing to check"}[drill["held"]]
    return f"{drill['event']}: {drill['did']} ({how})"


def _missing(records: Ranks, plan: Planned) -> tuple[bool | None, str]:
    """Return the result for a fault that did not occur: excused if the run broke before, or its time was after the
    end."""
    excused = plan.step is None or any(True for _ in select(records, Failed))
    return None if excused else False, "did not occur"


# Each function returns whether the expected effect occurred, and the observed one.


def _lost(case: Case) -> tuple[bool, str]:
    rank = case.plan.rank
    if any(each.rank == rank for _, each in select(case.records, Left)):
        return True, f"rank {rank} left, and the remaining ranks continued"
    ends = list({of: end for of, end in select(case.records, Failed) if of != rank}.values())
    if not ends:
        return False, "no rank was named"
    sentences = {end.error for end in ends}
    codes = sorted({end.exit_code for end in ends})
    took_s = max(end.at for end in ends) - case.made.at
    separated = _only_two_separated(case)
    named = separated or all(f"rank {rank} " in each or f"rank {rank}:" in each for each in sentences)
    held = named and (separated or len(sentences) == 1) and codes == [LOST_CODE] and took_s <= case.plan.bound_s
    by = f"{f'rank {rank}' if named else 'another rank'} named by {len(ends)}"
    return held, f"{by} after {took_s:.1f} s, exit code {', '.join(map(str, codes))}: {min(sentences)}"


def _only_two_separated(case: Case) -> bool:
    """Return whether only two ranks were separated: each side then names the other."""
    (start, *_) = (each for _, each in select(case.records, Start))
    return case.plan.kind == "cut" and start.world_size == 2 and any(True for _ in select(case.records, Lost))


def _survived(case: Case) -> tuple[bool, str]:
    reasons = [each.reason for _, each in select(case.records, Lost) if each.rank == case.plan.rank]
    reasons += [each.reason for _, each in select(case.records, Left) if each.rank == case.plan.rank]
    return not reasons, f"rank {case.plan.rank} was lost: {reasons[0]}" if reasons else "no rank was lost"


def _full(case: Case) -> tuple[bool, str]:
    ends = [end for _, end in select(case.records, Failed)]
    sentences = {end.error for end in ends}
    held = len(sentences) == 1 and FULL in min(sentences) and {end.exit_code for end in ends} == {FULL_CODE}
    return held, "; ".join(sorted(sentences)) or "no rank reported it"


def _not_judged(_: Case) -> tuple[bool | None, str]:
    return None, "no longer checked"


_JUDGES: dict[str, Callable[[Case], tuple[bool | None, str]]] = {
    "lost": _lost,
    "broken": _lost,
    "survived": _survived,
    "full": _full,
    "open": lambda case: (None, _survived(case)[1]),
}
