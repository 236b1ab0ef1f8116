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

from distlab.report.claims import Run, merge_checks
from distlab.report.records import Corrupted, Failed, Injected, Left, Lost, Planned, Ranks, Refused, Start, select

CONTROL = "tests/report/test_drills.py::test_a_drill_that_did_not_come_as_planned_does_not_hold"
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


def drills(records: Ranks) -> list[Run]:
    """An entry a planned fault, of flipped bits one a variant: event, should, did, held."""
    planned = {each.number: each for _, each in select(records, Planned)}
    made = [each for _, each in select(records, Injected)]
    entries = []
    for number in sorted(planned):
        of_this: list[Injected | None] = [each for each in made if each.number == number]
        entries += [_entry(records, planned[number], each) for each in of_this or [None]]
    return entries


def fault_sentence(drill: Run) -> str:
    """A drill in a line."""
    how = {True: "as expected", False: f"expected: {drill['should']}", None: "nothing to check"}[drill["held"]]
    return f"{drill['event']}: {drill['did']} ({how})"


def _entry(records: Ranks, plan: Planned, made: Injected | None) -> Run:
    outcome = (made.outcome if made else "") or plan.outcome
    event = (
        f"{plan.event} in {made.variant}"
        if made and made.variant and outcome in ("named", "seen", "unseen")
        else plan.event
    )
    held, did = _missing(records, plan) if made is None else _JUDGES[outcome](records, plan, made)
    detail = made.detail if made else ""
    should = SHOULD[outcome].format(bound=plan.bound_s, steps="training" if plan.checks else "timed steps")
    return {"event": event, "detail": detail, "should": should, "did": did, "held": held}


def _missing(records: Ranks, plan: Planned) -> tuple[bool | None, str]:
    """A fault that did not come: no wonder where the run broke before, or its second was after the end."""
    broke = any(True for _ in select(records, Failed))
    return (None if broke or plan.step is None else False), "did not occur"


def _lost(records: Ranks, plan: Planned, made: Injected) -> tuple[bool | None, str]:
    if any(each.rank == plan.rank for _, each in select(records, Left)):
        return True, f"rank {plan.rank} left, and the remaining ranks continued"
    ends = {rank: end for rank, end in select(records, Failed) if rank != plan.rank}
    if not ends:
        return False, "nobody was named"
    said = {end.error for end in ends.values()}
    codes = sorted({end.exit_code for end in ends.values()})
    took_s = max(end.at for end in ends.values()) - made.at
    named = all(f"rank {plan.rank} " in each or f"rank {plan.rank}:" in each for each in said) or _apart(records, plan)
    held = named and (len(said) == 1 or _apart(records, plan)) and codes == [LOST_CODE] and took_s <= plan.bound_s
    whom = f"rank {plan.rank} named" if named else "another named"
    return held, f"{whom} by {len(ends)} after {took_s:.1f} s, exit code {', '.join(map(str, codes))}: {min(said)}"


def _apart(records: Ranks, plan: Planned) -> bool:
    """A cut between two ranks alone: each side names the other."""
    (start, *_) = (each for _, each in select(records, Start))
    return plan.kind == "cut" and start.world_size == 2 and any(True for _ in select(records, Lost))


def _survived(records: Ranks, plan: Planned, made: Injected) -> tuple[bool | None, str]:  # noqa: ARG001
    gone = [each.reason for _, each in select(records, Lost) if each.rank == plan.rank]
    gone += [each.reason for _, each in select(records, Left) if each.rank == plan.rank]
    return not gone, f"rank {plan.rank} was lost: {gone[0]}" if gone else "nobody was lost by it"


def _full(records: Ranks, plan: Planned, made: Injected) -> tuple[bool | None, str]:  # noqa: ARG001
    ends = [end for _, end in select(records, Failed)]
    said = {end.error for end in ends}
    held = len(said) == 1 and FULL in min(said) and {end.exit_code for end in ends} == {FULL_CODE}
    return held, "; ".join(sorted(said)) or "no rank reported it"


def _refused(records: Ranks, plan: Planned, made: Injected) -> tuple[bool | None, str]:
    said = [each.sentence for _, each in select(records, Refused) if each.number == plan.number]
    folder, _, file = made.detail.partition("/")
    held = bool(said) and f"{folder} is damaged ({file}" in said[0]
    return held, said[0] if said else "it was taken"


def _named(records: Ranks, plan: Planned, made: Injected) -> tuple[bool | None, str]:
    found = [each for _, each in select(records, Corrupted) if each.variant == made.variant]
    if not found:
        return False, "nothing differed"
    tensor = made.detail.partition("[")[0]
    right = [each for each in found if each.tensor == tensor and 0 <= each.step - made.step < plan.bound_s]
    first = (right or found)[0]
    right_rank = first.ranks == [plan.rank] if first.majority else plan.rank in first.ranks
    who = f"rank{'s' * (len(first.ranks) > 1)} {', '.join(map(str, first.ranks))}"
    return bool(right) and right_rank, f"{who} named with {first.tensor} at step {first.step}"


def _seen(records: Ranks, plan: Planned, made: Injected) -> tuple[bool | None, str]:
    watched = plan.checks or WATCHED
    failed = [
        check["name"]
        for check in merge_checks(records)
        if check["variant"] == made.variant and check["name"] in watched and not check["passed"]
    ]
    return bool(failed), f"{' and '.join(failed)} failed" if failed else "no check failed"


def _unseen(records: Ranks, plan: Planned, made: Injected) -> tuple[bool | None, str]:  # noqa: ARG001
    return None, "not made"


def _open(records: Ranks, plan: Planned, made: Injected) -> tuple[bool | None, str]:
    return None, _survived(records, plan, made)[1]


_JUDGES = {
    "lost": _lost,
    "broken": _lost,
    "survived": _survived,
    "full": _full,
    "refused": _refused,
    "named": _named,
    "seen": _seen,
    "unseen": _unseen,
    "open": _open,
}
