"""Claims that a run of these settings has to have made and that are not there: a check that vanishes is a failure.

What has to be there is written down as a run begins (`Expected`), from the settings and the lesson's list alone, and
not by the code that makes the claims. A variant that was skipped aloud need not claim anything, nor a rank that left;
and a rank may say that there was nothing to hold (`Waived`).
"""

from collections import Counter

from workers.report.records import (
    Check,
    Comparison,
    End,
    Expected,
    Left,
    Ranks,
    Skipped,
    Waived,
    select,
)

NAME = "claims"
CONTROL = "tests/workers/report/test_expected.py::test_a_claim_that_vanishes_is_missed"


def missing(records: Ranks) -> list[Check]:
    """A failed check for each variant of which a claim is not there, of ranks that came through to the end."""
    found = next((each.claims for _, each in select(records, Expected)), None)
    if found is None:
        return [Check("", NAME, 1, 0, "no rank says which claims these settings need", CONTROL)]
    skipped = {each.variant for _, each in select(records, Skipped)}
    left = {each.rank for _, each in select(records, Left)}
    ranks = [rank for rank, _ in select(records, End) if rank not in left]
    made, waived = claims_of(records)
    faults: dict[str, list[str]] = {}
    for variant, name, times, one in found if ranks else ():
        if variant in skipped:
            continue
        who = [rank for rank in ranks if not name.startswith(tuple(waived.get(rank, ())))]
        lacking = [rank for rank in who if made[rank, variant, name] < times]
        if one:
            lacking = lacking if all(made[rank, variant, name] < times for rank in records) else []
        if lacking:
            most = max(made[rank, variant, name] for rank in lacking)
            faults.setdefault(variant, []).append(sentence(name, times, most, [] if one else lacking))
    return [Check(name, NAME, len(said), 0, "; ".join(said[:4]), CONTROL) for name, said in faults.items()]


def claims_of(records: Ranks) -> tuple[Counter[tuple[int, str, str]], dict[int, set[str]]]:
    """How often each rank made or waived a claim, and beginnings of names that it waived for all variants."""
    made: Counter[tuple[int, str, str]] = Counter()
    waived: dict[int, set[str]] = {}
    for claims in (select(records, Check), select(records, Comparison)):
        made.update((rank, each.variant, each.name) for rank, each in claims)
    for rank, each in select(records, Waived):
        made[rank, each.variant, each.name] += each.times
        if each.name.endswith(" "):
            waived.setdefault(rank, set()).add(each.name)
    return made, waived


def sentence(name: str, times: int, seen: int, ranks: list[int]) -> str:
    """Which claim is not there, and of whom."""
    who = f"rank {', '.join(map(str, ranks))}" if ranks else "some rank"
    often = f"{times} times, and found are {seen}" if times > 1 else "and it is not there"
    return f"these settings need {name!r} of {who} {often}"
