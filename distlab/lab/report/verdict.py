"""From records to a verdict: what every rank wrote goes in, `run.json` comes out, and nothing else is looked at.

A claim is held only if it was seen to hold: a difference that is not a finite number fails, and so does a run in which
a rank has no last word. The same records give the same verdict, on the cluster and years later without one.
"""

import json
import math
from collections import Counter
from collections.abc import Callable, Container, Iterable
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from msgspec.structs import asdict

from distlab.lab.report.fault_checks import drills
from distlab.lab.report.reading import BrokenRecord, replace_not_finite, write_atomically
from distlab.lab.report.records import (
    Activations,
    Called,
    Check,
    Classes,
    Comparison,
    Digest,
    Dropped,
    End,
    Expected,
    Failed,
    Finding,
    Left,
    Load,
    Lost,
    Memory,
    Ranks,
    Resumed,
    Run,
    Saved,
    Skipped,
    Start,
    Steps,
    Unshared,
    Waived,
    Wire,
    select,
)
from distlab.lab.report.units import name_ranks

Claim = TypeVar("Claim", Check, Comparison)

# What the ranks claim, brought together: a check or comparison that several ranks wrote becomes one entry, the worst.
#
# A claim that cannot be tested does not hold: a difference that is not a finite number is over every tolerance.


def merge_checks(records: Ranks) -> list[Run]:
    """One entry a claim, merged over ranks and repetitions: the largest difference, NaN above all."""
    return as_entries(check for _, check in _worst(records, Check))


def as_entries(checks: Iterable[Check]) -> list[Run]:
    """Checks as run.json holds them."""
    return [asdict(check) | {"passed": passes(check)} for check in checks]


def merge_comparisons(records: Ranks) -> list[Run]:
    """One entry a comparison: that of the rank farthest off, where one that decides and fails comes before all."""
    found = _worst(records, Comparison)
    return [asdict(entry) | {"passed": passes(entry), "rank": rank} for rank, entry in found]


def _worst(records: Ranks, kind: type[Claim]) -> list[tuple[int, Claim]]:
    """Of the claims of one variant and name that of the rank where it is worst: a failed one above all that hold."""
    merged: dict[tuple[str, str], tuple[int, Claim]] = {}
    for rank, claim in select(records, kind):
        key = claim.variant, claim.name
        if key not in merged or _badness(claim) > _badness(merged[key][1]):
            merged[key] = rank, claim
    return list(merged.values())


def _badness(claim: Check | Comparison) -> tuple[bool, float]:
    off = _off(claim)
    return not passes(claim), math.inf if math.isnan(off) else off


def _off(claim: Check | Comparison) -> float:
    """By how much."""
    return claim.max_abs_diff if isinstance(claim, Check) else abs(claim.measured - claim.predicted)


def passes(claim: Check | Comparison) -> bool:
    """Whether a claim of one rank holds; one that is informational always does."""
    off = _off(claim)
    informational = isinstance(claim, Comparison) and not claim.decides
    return informational or (math.isfinite(off) and abs(off) <= claim.tolerance)


# Claims that a run of these settings has to have made and that are not there: a check that vanishes is a failure.
#
# What has to be there is written down as a run begins (`Expected`), from the settings and the lesson's list alone,
# and not by the code that makes the claims. A variant that was skipped aloud need not claim anything, nor a rank that
# left; and a rank may say that there was nothing to hold (`Waived`).

NAME = "claims"
CONTROL = "tests/lab/report/test_expected.py::test_a_claim_that_vanishes_is_missed"


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
    for variant, name, times, one in found:
        if variant in skipped:
            continue
        who = [rank for rank in ranks if not name.startswith(tuple(waived.get(rank, ())))]
        lacking = [rank for rank in who if made[rank, variant, name] < times]
        if one:
            lacking = lacking if all(made[rank, variant, name] < times for rank in records) else []
        if lacking:
            most = max(made[rank, variant, name] for rank in lacking)
            faults.setdefault(variant, []).append(missing_claim_sentence(name, times, most, [] if one else lacking))
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


def missing_claim_sentence(name: str, times: int, seen: int, ranks: list[int]) -> str:
    """Which claim is not there, and of whom."""
    who = name_ranks(ranks) if ranks else "some rank"
    often = f"{times} times, and found are {seen}" if times > 1 else "and it is not there"
    return f"these settings need {name!r} of {who} {often}"


SCRIPT, PROOF = "check", "prove"  # the run_mode of someone's script, in which nothing is proven, and of their model
EXIT_CODES = {"pass": 0, "fail": 1, "refused": 2, "lost": 3}


def judge(records: Ranks) -> Run:
    """The run as `run.json` holds it, from the records of each rank; raises BrokenRecord if they are not of one run.

    Lists inside a variant have one entry a rank, None where that rank wrote no such record. Beyond the fields that
    scripts rely on, `proven` says whether the proof was made and held, `timed_held` whether the timed steps were held
    against one process (LAB_PROOF=0 leaves it out), `errors` what ended a rank, `unseen` whose records are not here,
    and a comparison names the `rank` that was farthest off and whether it `decides`.
    """
    start = first(records)
    checks, comparisons = merge_checks(records), merge_comparisons(records)
    left = {entry.rank: _named(entry) for _, entry in select(records, Left)}
    # How one ended that had left before does not decide: the others had gone on.
    ends = [(rank, end) for rank, end in select(records, Failed) if rank not in left]
    errors = [{"rank": rank, "exit_code": end.exit_code, "error": end.error} for rank, end in ends]
    lost = _lost(records, start.world_size, errors, left)
    if start.says_claims and not errors and not lost:
        checks += as_entries(missing(records))
    verdict = _verdict(errors, lost, all(claim["passed"] for claim in checks + comparisons))
    return {
        "schema": 1,
        "run_id": start.run_id,
        "run_mode": start.run_mode,
        "world_size": start.world_size,
        "verdict": verdict,
        "proven": verdict == "pass" and proof_on(start.config) and bool(checks) and start.run_mode != SCRIPT,
        "timed_held": any(check["name"] == "timed losses" for check in checks),
        "config": start.config,
        "versions": start.versions,
        "by_torch": list(start.by_torch),
        "mistake": start.mistake or None,
        "variants": [_variant(name, records, start.world_size) for name in _variant_names(records)],
        "resumed": next((asdict(each) for _, each in select(records, Resumed)), None),
        "checkpoints": [
            {"step": s.step, "seconds": s.seconds, "held_seconds": s.held_s, "bytes": s.num_bytes, "error": s.error}
            for _, s in select(records, Saved)
        ],
        "skipped": [asdict(skip) for skip in dict.fromkeys(skip for _, skip in select(records, Skipped))],
        "checks": checks,
        "comparisons": comparisons,
        "lost": sorted([*lost, *left.values()], key=lambda entry: entry["rank"]),
        "errors": errors,
        "findings": [asdict(each) for _, each in select(records, Finding)],
        "drills": drills(records),
        "unseen": _unseen(records, start.world_size),
        "dropped": _dropped(records),
        "machines": machines(records),
    }


def proof_on(config: Run) -> bool:
    """Whether the settings of a run leave the proof in."""
    return str(config.get("LAB_PROOF", 1)).lower() not in ("0", "false")


def exit_code(run: Run) -> int:
    """The code that every rank of this run returns; 143 or 130 if it was stopped and nothing else went wrong."""
    if run["verdict"] == "lost" and not run["lost"]:
        codes = [error["exit_code"] for error in run["errors"]]
        return 3 if 3 in codes else max(codes)
    return EXIT_CODES[run["verdict"]]


def as_lines(run: Run) -> list[str]:
    """The text of `run.json`; NaN and infinity become null, since JSON has no word for them."""
    return [json.dumps(replace_not_finite(run, lambda _: None), indent=1, allow_nan=False), "\n"]


def write_run(folder: Path, run: Run) -> None:
    """Write `run.json` in place of the one that is there: for a run that is over (run_folder.py)."""
    write_atomically(folder / "run.json", as_lines(run))


def first(records: Ranks) -> Start:
    """The start of the lowest rank; raises BrokenRecord where there is none or the ranks are not of one run."""
    starts = list(select(records, Start))
    if not starts:
        raise BrokenRecord("no rank has a Start record: nothing says what was run")
    start = starts[0][1]
    for rank, other in starts:
        if (
            other.rank != rank
            or rank >= other.world_size
            or (other.run_id, other.world_size) != (start.run_id, start.world_size)
        ):
            raise BrokenRecord(
                f"the records of rank {rank} begin as rank {other.rank} of {other.world_size} in run {other.run_id}, "
                f"those of rank {starts[0][0]} are of {start.world_size} in run {start.run_id}"
            )
    return start


def slowest(seconds: list[float | None]) -> float | None:
    """The time of a step is that of its slowest rank; None if no rank timed it."""
    return max((value for value in seconds if value is not None), default=None)


def times_steps(run: Run) -> bool:
    """Whether the steps of any variant were timed."""
    return any(slowest(variant["step_seconds"]) for variant in run["variants"])


def pytorch_own(run: Run) -> str | None:
    """The variant of this run that is PyTorch's own, if it was timed."""
    timed = {variant["name"] for variant in run["variants"] if slowest(variant["step_seconds"])}
    return next((name for name in run["by_torch"] if name in timed), None)


def _unseen(records: Ranks, world_size: int) -> list[Run]:
    """The ranks that wrote nothing here: on a disk of their own, on which host, or not at all, and then None."""
    seen = {rank for rank, _ in select(records, Start)}
    hosts = next((entry.hosts for _, entry in select(records, Unshared)), [None] * world_size)
    return [{"rank": rank, "host": hosts[rank]} for rank in range(world_size) if rank not in seen]


def machines(records: Ranks) -> list[Run]:
    """An entry a machine, which several containers may share: its ranks, and its load as the lowest of them began and
    ended. None of a run whose records do not tell it."""
    found: dict[str, Run] = {}
    for rank, load in select(records, Load):
        new = {"cores": load.cores, "processor": load.processor, "ranks": [], "start": None, "end": None}
        entry = found.setdefault(load.machine, new)
        entry["ranks"] += [rank] if rank not in entry["ranks"] else []
        seen = {name: getattr(load, name) for name in ("load_average", "runnable", "cpu_pressure", "at")}
        entry[load.moment] = entry[load.moment] or seen
    return list(found.values())


def _dropped(records: Ranks) -> Run | None:
    """What came to all ranks and was not believed; None where nothing did."""
    by_fault: Counter[str] = Counter()
    by_source: Counter[str] = Counter()
    for _, entry in select(records, Dropped):
        by_fault.update(entry.by_fault)
        by_source.update(entry.by_source)
    if not by_fault:
        return None
    return {"messages": sum(by_fault.values()), "by_fault": dict(by_fault), "by_source": dict(by_source)}


def _verdict(errors: list[Run], lost: list[Run], held: bool) -> str:
    codes = {error["exit_code"] for error in errors}
    if 2 in codes:
        return "refused"
    if any(code != 3 and code < 128 for code in codes):
        return "fail"
    if lost or codes:  # before the checks: the ranks ended with 3, whatever had been checked until then
        return "lost"
    return "pass" if held else "fail"


def _lost(records: Ranks, world_size: int, errors: list[Run], left: Container[int]) -> list[Run]:
    """The ranks that the survivors named; if nothing explains the end, those that have no last word themselves."""
    named = {
        lost.rank: _named(lost) for rank, lost in select(records, Lost) if rank not in left and lost.rank not in left
    }
    if not named and not errors:
        ended = {rank for rank, _ in select(records, End)}
        silent = [rank for rank in range(world_size) if rank not in ended and rank not in left]
        return [{"rank": rank, "step": None, "reason": "its records stop before the end of the run"} for rank in silent]
    return [named[rank] for rank in sorted(named)]


def _named(entry: Lost | Left) -> Run:
    back = ", until it came back" if isinstance(entry, Left) and entry.back else ""
    return {"rank": entry.rank, "step": entry.step, "reason": entry.reason + back}


def _variant_names(records: Ranks) -> list[str]:
    kinds: tuple[type[Any], ...] = (Steps, Called, Wire, Memory)
    return list(dict.fromkeys(record.variant for kind in kinds for _, record in select(records, kind)))


def _variant(name: str, records: Ranks, world_size: int) -> Run:
    """One variant's numbers, a list entry a rank: medians of the timed steps, bytes a step, the peak."""

    def a_rank(
        kind: type[Any], numbers: Callable[[Any], list[float]], merge: Callable[[list[float]], float]
    ) -> list[Any]:
        found: dict[int, list[float]] = {}
        for rank, record in select(records, kind):
            if record.variant == name:
                found.setdefault(rank, []).extend(numbers(record))
        return [merge(found[rank]) if found.get(rank) else None for rank in range(world_size)]

    found_classes = {rank: entry for rank, entry in select(records, Classes) if entry.variant == name}
    classes = [found_classes.get(rank) for rank in range(world_size)]
    return {
        "name": name,
        "step_seconds": a_rank(Steps, lambda steps: steps.step_seconds, median),
        "cpu_seconds": a_rank(Steps, lambda steps: steps.cpu_seconds, median),
        "wire_bytes": a_rank(Wire, lambda wire: [wire.sent_bytes], sum),
        "called_bytes": a_rank(Called, lambda called: [called.called_bytes], sum),
        "peak_bytes": a_rank(Memory, lambda memory: [memory.peak_bytes], max),
        "rest_bytes": [entry and sum(entry.rest_bytes.values()) for entry in classes],
        "rest_by_class": [entry and entry.rest_bytes for entry in classes],
        "peak_by_class": [entry and entry.peak_bytes for entry in classes],
        "activation_bytes": a_rank(Activations, lambda held: [held.peak_bytes], max),
        "weights_sha256": next((entry.sha256 for _, entry in select(records, Digest) if entry.variant == name), None),
    }
