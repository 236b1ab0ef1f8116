"""What the ranks claim, brought together: a check or comparison that several ranks wrote becomes one entry, the worst.

A claim that cannot be tested does not hold: a difference that is not a finite number is over every tolerance.
"""

import math
from collections.abc import Iterable
from typing import Any

from msgspec.structs import asdict

from distlab.report.records import Check, Comparison, Ranks, select

Run = dict[str, Any]  # run.json, or an entry in one of its lists


def merge_checks(records: Ranks) -> list[Run]:
    """One entry a claim, merged over ranks and repetitions: the largest difference, NaN above all."""
    merged: dict[tuple[str, str], Check] = {}
    for _, check in select(records, Check):
        key = check.variant, check.name
        if key not in merged or _excess(check) > _excess(merged[key]):
            merged[key] = check
    return as_entries(merged.values())


def as_entries(checks: Iterable[Check]) -> list[Run]:
    """Checks as run.json holds them."""
    return [asdict(check) | {"passed": _within(check.max_abs_diff, check.tolerance)} for check in checks]


def _excess(check: Check) -> tuple[bool, float]:
    """Orders checks by how bad they are: a failed one above all held ones, then by difference."""
    difference = check.max_abs_diff if not math.isnan(check.max_abs_diff) else math.inf
    return not _within(check.max_abs_diff, check.tolerance), difference


def merge_comparisons(records: Ranks) -> list[Run]:
    """One entry a comparison: that of the rank farthest off, where one that decides and fails comes before all."""
    merged: dict[tuple[str, str], tuple[int, Comparison]] = {}
    for rank, entry in select(records, Comparison):
        key = entry.variant, entry.name
        if key not in merged or _farness(entry) > _farness(merged[key][1]):
            merged[key] = rank, entry
    return [asdict(entry) | {"passed": not _misses(entry), "rank": rank} for rank, entry in merged.values()]


def _farness(entry: Comparison) -> tuple[bool, float]:
    distance = abs(entry.measured - entry.predicted)
    return _misses(entry), math.inf if math.isnan(distance) else distance


def _misses(entry: Comparison) -> bool:
    return entry.decides and not _within(abs(entry.measured - entry.predicted), entry.tolerance)


def _within(difference: float, tolerance: float) -> bool:
    return math.isfinite(difference) and abs(difference) <= tolerance
