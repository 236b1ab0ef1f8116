"""The verdict: computes `run.json` from the records of all ranks, and from nothing else.

A claim holds only if it was observed to hold: a difference that is not finite fails, and so does a run in which a rank
has no last record. The same records give the same verdict at any time, on the cluster or elsewhere.
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

# Claims of all ranks, merged: a check or comparison of several ranks becomes one entry, the worst.
#
# A claim that cannot be tested fails: a difference that is not finite exceeds every tolerance.


def merge_checks(records: Ranks) -> list[Run]:
    """Return one entry per claim, merged over ranks and repetitions: the largest difference, NaN first."""
    return as_entries(check for _, check in _worst(records, Check))


def as_entries(checks: Iterable[Check]) -> list[Run]:
    """Return checks as entries of run.json."""
    return [asdict(check) | {"passed": passes(check)} for check in checks]


def merge_comparisons(records: Ranks) -> list[Run]:
    """Return one entry per comparison: of the rank with the largest error, but a deciding failure comes first."""
    found = _worst(records, Comparison)
    return [asdict(entry) | {"passed": passes(entry), "rank": rank} for rank, entry in found]


def _worst(records: Ranks, kind: type[Claim]) -> list[tuple[int, Claim]]:
    """Return for each variant and name the claim of the rank where it is worst: failed ones first."""
    merged: dict[tuple[str, str], tuple[int, Claim]] = {}
    for rank, claim in select(records, kind):
        key = claim.variant, claim.name
        if key not in merged or _badness(claim) > _badness(merged[key][1]):
            merged[key] = rank, claim
    return list(merged.values())


def _badness(claim: Check | Comparison) -> tuple[bool, float]:
    error = _error_size(claim)
    return not passes(claim), math.inf if math.isnan(error) else error


def _error_size(claim: Check | Comparison) -> float:
    """Return the size of its error."""
    return claim.max_abs_diff if isinstance(claim, Check) else abs(claim.measured - claim.predicted)


def passes(claim: Check | Comparison) -> bool:
    """Return whether a claim of one rank holds; informational ones always do."""
    error = _error_size(claim)
    informational = isinstance(claim, Comparison) and not claim.decides
    return informational or (math.isfinite(error) and abs(error) <= claim.tolerance)


# Missing claims: a check that a run of these settings needs and that is not there counts as failed.
#
# The needed claims are recorded when a run begins (`Expected`), from the settings and the lesson's list, independently
# of the code that makes them. Skipped variants and ranks that left need not make any; a rank may record that there was
# nothing to check (`Waived`).

NAME = "claims"
CONTROL = "tests/lab/report/test_expected.py::test_a_claim_that_vanishes_is_missed"


def missing(records: Ranks) -> list[Check]:
    """Return a failed check for each variant with a missing claim, of ranks that finished."""
    found = next((each.claims for _, each in select(records, Expected)), None)
    if found is None:
        return [Check("", NAME, 1, 0, "no rank has recorded which checks these settings require", CONTROL)]
    skipped = {each.variant for _, each in select(records, Skipped)}
    left = {each.rank for _, each in select(records, Left)}
    ranks = [rank for rank, _ in select(records, End) if rank not in left]
    made, waived = claims_of(records)
    faults: dict[str, list[str]] = {}
    for variant, name, times, one in found:
        if variant in skipped:
            continue
        expected = [rank for rank in ranks if not name.startswith(tuple(waived.get(rank, ())))]
        lacking = [rank for rank in expected if made[rank, variant, name] < times]
        if one:
            lacking = lacking if all(made[rank, variant, name] < times for rank in records) else []
        if lacking:
            most = max(made[rank, variant, name] for rank in lacking)
            faults.setdefault(variant, []).append(missing_claim_sentence(name, times, most, [] if one else lacking))
    return [
        Check(name, NAME, len(sentences), 0, "; ".join(sentences[:4]), CONTROL) for name, sentences in faults.items()
    ]


def claims_of(records: Ranks) -> tuple[Counter[tuple[int, str, str]], dict[int, set[str]]]:
    """Return how often each rank made or waived a claim, and name prefixes waived for all variants."""
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
    """Return which claim is missing, and on which ranks."""
    who = name_ranks(ranks) if ranks else "some rank"
    found = f" {times} times, but there are {seen}" if times > 1 else ", but it is missing"
    return f"these settings require the check {name!r} from {who}{found}"


SCRIPT, PROOF = "check", "prove"  # the run_mode of a user's script, in which nothing is proven, and of a user's model
EXIT_CODES = {"pass": 0, "fail": 1, "refused": 2, "lost": 3}


def judge(records: Ranks) -> Run:
    """Return the run as in `run.json`, from the records of each rank; raises BrokenRecord if they are of several runs.

    Lists inside a variant have one entry per rank, None if that rank has no such record. Besides the stable fields,
    `proven` says whether the proof was made and passed, `timed_held` whether the timed steps were compared with one
    process (LAB_PROOF=0 leaves it out), `errors` what ended ranks, `unseen` whose records are missing, and a comparison
    has the `rank` with the largest error and whether it `decides`.
    """
    start = first(records)
    checks, comparisons = merge_checks(records), merge_comparisons(records)
    left = {entry.rank: _named(entry) for _, entry in select(records, Left)}
    # The end of a rank that had left before does not count: the others continued.
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
    """Return whether the settings of a run include the proof."""
    return str(config.get("LAB_PROOF", 1)).lower() not in ("0", "false")


def exit_code(run: Run) -> int:
    """Return the exit code of every rank of this run; 143 or 130 if it was stopped and nothing else failed."""
    if run["verdict"] == "lost" and not run["lost"]:
        codes = [error["exit_code"] for error in run["errors"]]
        return 3 if 3 in codes else max(codes)
    return EXIT_CODES[run["verdict"]]


def as_lines(run: Run) -> list[str]:
    """Return the text of `run.json`; NaN and infinity become null, which JSON lacks."""
    return [json.dumps(replace_not_finite(run, lambda _: None), indent=1, allow_nan=False), "\n"]


def write_run(folder: Path, run: Run) -> None:
    """Replace `run.json`, for a run that is over (run_folder.py)."""
    write_atomically(folder / "run.json", as_lines(run))


def first(records: Ranks) -> Start:
    """Return the start of the lowest rank; raises BrokenRecord if it is missing or ranks are of several runs."""
    starts = list(select(records, Start))
    if not starts:
        raise BrokenRecord("no rank has a Start record, so it is unknown what was run")
    start = starts[0][1]
    for rank, other in starts:
        if (
            other.rank != rank
            or rank >= other.world_size
            or (other.run_id, other.world_size) != (start.run_id, start.world_size)
        ):
            raise BrokenRecord(
                f"the records of rank {rank} are from rank {other.rank} of {other.world_size} in run {other.run_id},"
                f" but those of rank {starts[0][0]} are from {start.world_size} ranks in run {start.run_id}"
            )
    return start


def slowest(seconds: list[float | None]) -> float | None:
    """Return the time of a step on its slowest rank; None if no rank timed it."""
    return max((value for value in seconds if value is not None), default=None)


def times_steps(run: Run) -> bool:
    """Return whether the steps of any variant were timed."""
    return any(slowest(variant["step_seconds"]) for variant in run["variants"])


def pytorch_own(run: Run) -> str | None:
    """Return this run's PyTorch variant, if it was timed."""
    timed = {variant["name"] for variant in run["variants"] if slowest(variant["step_seconds"])}
    return next((name for name in run["by_torch"] if name in timed), None)


def _unseen(records: Ranks, world_size: int) -> list[Run]:
    """Return the ranks without records here, with the host that has them, or None if there are none at all."""
    seen = {rank for rank, _ in select(records, Start)}
    hosts = next((entry.hosts for _, entry in select(records, Unshared)), [None] * world_size)
    return [{"rank": rank, "host": hosts[rank]} for rank in range(world_size) if rank not in seen]


def machines(records: Ranks) -> list[Run]:
    """Return one entry per machine, which several containers may share: its ranks, and its load at the start and end of
    the lowest one. Empty if the records lack it."""
    found: dict[str, Run] = {}
    for rank, load in select(records, Load):
        new = {"cores": load.cores, "processor": load.processor, "ranks": [], "start": None, "end": None}
        entry = found.setdefault(load.machine, new)
        entry["ranks"] += [rank] if rank not in entry["ranks"] else []
        seen = {name: getattr(load, name) for name in ("load_average", "runnable", "cpu_pressure", "at")}
        entry[load.moment] = entry[load.moment] or seen
    return list(found.values())


def _dropped(records: Ranks) -> Run | None:
    """Return the rejected messages of all ranks; None if there were none."""
    by_fault: Counter[str] = Counter()
    by_source: Counter[str] = Counter()
    for _, entry in select(records, Dropped):
        by_fault.update(entry.by_fault)
        by_source.update(entry.by_source)
    if not by_fault:
        return None
    return {"messages": sum(by_fault.values()), "by_fault": dict(by_fault), "by_source": dict(by_source)}


def _verdict(errors: list[Run], lost: list[Run], all_passed: bool) -> str:
    codes = {error["exit_code"] for error in errors}
    if 2 in codes:
        return "refused"
    if any(code != 3 and code < 128 for code in codes):
        return "fail"
    if lost or codes:  # before the checks: lost ranks mean exit code 3, whatever was checked before
        return "lost"
    return "pass" if all_passed else "fail"


def _lost(records: Ranks, world_size: int, errors: list[Run], left: Container[int]) -> list[Run]:
    """Return the ranks that the survivors named; if nothing explains the end, those without a last record."""
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
    """Return one variant's numbers, one list entry per rank: medians of timed steps, bytes per step, the peak."""

    def per_rank(
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
        "step_seconds": per_rank(Steps, lambda steps: steps.step_seconds, median),
        "cpu_seconds": per_rank(Steps, lambda steps: steps.cpu_seconds, median),
        "wire_bytes": per_rank(Wire, lambda wire: [wire.sent_bytes], sum),
        "called_bytes": per_rank(Called, lambda called: [called.called_bytes], sum),
        "peak_bytes": per_rank(Memory, lambda memory: [memory.peak_bytes], max),
        "rest_bytes": [entry and sum(entry.rest_bytes.values()) for entry in classes],
        "rest_by_class": [entry and entry.rest_bytes for entry in classes],
        "peak_by_class": [entry and entry.peak_bytes for entry in classes],
        "activation_bytes": per_rank(Activations, lambda activations: [activations.peak_bytes], max),
        "weights_sha256": next((entry.sha256 for _, entry in select(records, Digest) if entry.variant == name), None),
    }
