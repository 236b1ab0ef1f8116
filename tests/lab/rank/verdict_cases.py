"""Test the verdict code on made-up records of three ranks, each with at most one known fault.

A wrong verdict would make every other check worthless. So there are records that must fail, with the fault on each rank
in turn, and records that must pass.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from msgspec.structs import replace

from distlab.lab.rank.finish import judged
from distlab.lab.report.records import (
    Check,
    Comparison,
    End,
    Expected,
    Failed,
    Injected,
    Left,
    Lost,
    Planned,
    Ranks,
    Record,
    Skipped,
    Start,
    Waived,
)
from distlab.lab.report.verdict import exit_code

RANKS = range(3)
PASS, FAIL, LOST = ("pass", 0), ("fail", 1), ("lost", 3)
HELD = Check("v", "gradients", 1e-13, 1e-12)
NEAR = Comparison("v", "bytes", "B", 100.0, 101.0, 2.0)


class Case(NamedTuple):
    """Records, and the verdict and exit code that they must get."""

    what: str
    records: Ranks
    wanted: tuple[str, int]
    entry: dict[str, Any] = {}  # noqa: RUF012  fields that run.json must have for the check or comparison


def misjudged(case: Case) -> str:
    """Return the wrong verdict as a sentence; empty if the judge is right."""
    run, _ = judged({rank: list(of_rank) for rank, of_rank in case.records.items()}, 0)
    found = run["verdict"], exit_code(run)
    if found != case.wanted:
        return f"{case.what} is judged {found[0]!r} with exit code {found[1]}, and has to be {case.wanted}"
    seen: dict[str, Any] = next(
        (each for each in run["checks"] + run["comparisons"] if each["name"] in ("gradients", "bytes")), {}
    )
    off = {key: seen.get(key) for key, value in case.entry.items() if seen.get(key) != value}
    return f"{case.what} is written down with {off}" if off else ""


def cases() -> Iterator[Case]:
    yield Case("a run in which everything passes", made_up(), PASS)
    yield Case("a run whose proof was made", made_up(HELD), PASS, {"max_abs_diff": 1e-13, "passed": True})
    yield from of_checks()
    yield from of_comparisons()
    yield from of_claims()
    yield from of_ends()
    yield from of_drills()


def of_checks() -> Iterator[Case]:
    """The worst value counts, on any rank and in any order."""
    for value in (1e-11, math.nan, math.inf, -1e-11):
        for rank in RANKS:
            one = made_up(HELD, other={rank: [replace(HELD, max_abs_diff=value)]})
            yield Case(f"a check that is off by {value} on rank {rank} of three", one, FAIL)
        for order in ([HELD, replace(HELD, max_abs_diff=value)], [replace(HELD, max_abs_diff=value), HELD]):
            yield Case(f"a check that is once off by {value} on one rank", made_up(other={1: order}), FAIL)
    for rank in RANKS:
        worst = replace(HELD, max_abs_diff=5e-13)
        one = made_up(HELD, other={rank: [worst]})
        yield Case(f"the largest difference that passes, on rank {rank}", one, PASS, {"max_abs_diff": 5e-13})
    exact = made_up(replace(HELD, max_abs_diff=1e-12))
    yield Case("a check that is off by its tolerance", exact, PASS)
    yield Case("a check of one variant that fails beside another's", made_up(HELD, Check("w", "x", 1, 0)), FAIL)


def of_comparisons() -> Iterator[Case]:
    """The largest deviation counts, unless it is only informational."""
    for off in (3.0, -3.0, math.nan, math.inf):
        far = replace(NEAR, measured=100.0 + off)
        for rank in RANKS:
            one = made_up(NEAR, other={rank: [far]})
            yield Case(f"a prediction that is off by {off} of 2 on rank {rank}", one, FAIL, {"rank": rank})
        shown = made_up(replace(far, decides=False))
        yield Case(f"a prediction that is off by {off} and only informational", shown, PASS)
        mixed = made_up(replace(NEAR, measured=1e9, decides=False), other={1: [far]})
        yield Case(f"one that decides and is off by {off}, beside one that is informational", mixed, FAIL, {"rank": 1})
    for off in (2.0, -2.0):
        yield Case(f"a prediction that is off by {off} of 2", made_up(replace(NEAR, measured=100.0 + off)), PASS)


def of_claims() -> Iterator[Case]:
    """All checks that the settings require must be there."""
    for times, one in ((1, False), (2, False), (1, True)):
        needs = [["v", "gradients", times, one]]
        made = [HELD] * times
        yield Case("all claims that are needed", made_up(*made, needs=needs), PASS)
        yield Case("a claim that nobody made", made_up(needs=needs), FAIL)
        for rank in RANKS:
            lacks = made_up(*made, needs=needs, other={rank: made[1:]})
            yield Case(f"a claim that rank {rank} did not make {times} times", lacks, PASS if one else FAIL)
        yield Case("a claim of a variant that was skipped", made_up(needs=needs, other={0: [Skipped("v", "")]}), PASS)
        waived = Waived("v", "gradients", "there is nothing to check", times)
        yield Case("a claim that was waived", made_up(waived, needs=needs), PASS)
    other = made_up(Check("w", "gradients", 0, 0), Check("v", "weights", 0, 0), needs=[["v", "gradients", 1, True]])
    yield Case("a claim that was made of another variant or by another name", other, FAIL)
    silent: Ranks = {rank: [each for each in of if not isinstance(each, Expected)] for rank, of in made_up().items()}
    yield Case("a run that does not say what it needs", silent, FAIL)


def of_ends() -> Iterator[Case]:
    for rank in RANKS:
        whole = made_up(HELD)
        without = {other: of_rank for other, of_rank in whole.items() if other != rank}
        yield (
            Case(f"a run without the records of rank {rank}", without, LOST)
            if rank
            else Case("a run of which rank 0 has no end", ended(whole, 0), LOST)
        )
        yield Case(f"a run that ends early on rank {rank}", ended(whole, rank), LOST)
        for code, wanted in ((1, FAIL), (2, ("refused", 2)), (3, LOST), (143, ("lost", 143))):
            yield Case(f"rank {rank} that ended with {code}", ended(whole, rank, Failed(code, "an error")), wanted)
    said = Lost(1, 0, "silent"), Failed(3, "rank 1 lost")
    yield Case("a rank that the others named", ended(ended(made_up(), 0, *said), 2, *said), LOST)
    left = Left(1, 0, "silent")
    yield Case("a rank that left, while the remaining ranks continued", ended(made_up(left, other={1: []}), 1), PASS)


def of_drills() -> Iterator[Case]:
    """An injected fault with an unexpected outcome fails the run, and so does an injected bug that no check caught."""
    plan, made = Planned(0, "pause", "pause", 1, "survived", 2.0, 1), Injected(0, 1, 1, "", 0.0)
    yield Case("an injected fault with the expected outcome", made_up(other={0: [plan], 1: [made]}), PASS)
    left = Left(1, 1, "no heartbeat", back=True)
    yield Case("an injected fault with another outcome", made_up(other={0: [plan, left], 1: [made]}), FAIL)
    yield Case("a planned fault that did not occur", made_up(other={0: [plan]}), FAIL)
    bug = {"name": "bug", "what": "something", "check": "gradients"}
    mistaken = {
        rank: [replace(each, mistake=bug) if isinstance(each, Start) else each for each in of_rank]
        for rank, of_rank in made_up(HELD).items()
    }
    yield Case("an injected bug that no check caught", mistaken, FAIL)


def made_up(*records: Record, needs: list[list[Any]] | None = None, other: dict[int, list[Any]] | None = None) -> Ranks:
    """Return three ranks that reached the end, each with `records` or those of `other`, and the required checks `needs`."""
    found: Ranks = {}
    for rank in RANKS:
        start = Start(rank, "made up", "dp", len(RANKS), "host", {}, {}, {}, says_claims=True)
        body = (other or {}).get(rank, list(records))
        found[rank] = [start, Expected(needs or []), *body, End(rank, 0.0, None, 1.0, 0.0)]
    return found


def ended(records: Ranks, rank: int, *otherwise: Record) -> Ranks:
    """Return the same with the end of `rank` replaced by `otherwise`."""
    of_rank = [each for each in records[rank] if not isinstance(each, End)]
    return records | {rank: [*of_rank, *otherwise]}
