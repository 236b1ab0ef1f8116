"""Several runs of one mode as curves over WORLD_SIZE: what a step costs each variant on more and more ranks.

Efficiency is the samples a second of N ranks over N/n times those of n ranks, where n is the smallest WORLD_SIZE at
which the variant was timed: at 1 every further rank does all of its share.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

from workers.report.claims import Run
from workers.report.judge import slowest
from workers.report.records import Ranks

# Who a rank is and where its files go says nothing of what is run; WORLD_SIZE and LAB_SEED are there to differ.
OF_NO_ACCOUNT = (
    "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "LAB_RUN_ID", "LAB_RUNS_DIR", "WORLD_SIZE", "LAB_SEED",
)  # fmt: skip


class Seen(NamedTuple):
    """What one run says of a variant, None for what it did not measure."""

    step_s: float  # the slowest rank's median
    samples_per_s: float
    wire_bytes: float | None  # a step, of the rank that sends most
    peak_bytes: float | None  # of the rank that holds most


class Point(NamedTuple):
    """A variant at one WORLD_SIZE: the medians over its runs there."""

    world_size: int
    num_runs: int
    seen: Seen
    efficiency: float


def scaling(runs: Sequence[Run]) -> dict[str, list[Point]]:
    """By variant its points, the smallest WORLD_SIZE first; a variant that no run timed has none."""
    found: dict[str, dict[int, list[Seen]]] = {}
    for run in sorted(runs, key=lambda run: int(run["world_size"])):
        for variant in run["variants"]:
            if step_s := slowest(variant["step_seconds"]):
                rate, wire, peak = run["config"]["LAB_BATCH"] / step_s, variant["wire_bytes"], variant["peak_bytes"]
                seen = Seen(step_s, rate, slowest(wire), slowest(peak))
                found.setdefault(variant["name"], {}).setdefault(run["world_size"], []).append(seen)
    return {name: list(points(by_size)) for name, by_size in found.items()}


def points(by_size: dict[int, list[Seen]]) -> Iterable[Point]:
    """One variant's points, of what its runs at each WORLD_SIZE say, the smallest first."""
    merged = {size: middle(seen) for size, seen in by_size.items()}
    least = next(iter(merged))
    for size, seen in merged.items():
        ideal = merged[least].samples_per_s * size / least
        yield Point(size, len(by_size[size]), seen, seen.samples_per_s / ideal)


def middle(seen: Sequence[Seen]) -> Seen:
    """The median of each number."""
    return Seen(
        median(each.step_s for each in seen),
        median(each.samples_per_s for each in seen),
        _median(each.wire_bytes for each in seen),
        _median(each.peak_bytes for each in seen),
    )


def _median(values: Iterable[float | None]) -> float | None:
    found = [value for value in values if value is not None]
    return median(found) if found else None


def differing(runs: Sequence[Run]) -> list[str]:
    """The settings, and the versions by their names, in which these runs are not all alike."""
    return [
        name if kind == "config" else f"the version of {name}"
        for kind in ("config", "versions")
        for name in dict.fromkeys(name for run in runs for name in run[kind])
        if name not in OF_NO_ACCOUNT and any(run[kind].get(name) != runs[0][kind].get(name) for run in runs)
    ]


def incomparable(judged: Sequence[tuple[Path, Run, Ranks]]) -> list[str]:
    """A sentence for each run that has no place beside the others: of another mode, named twice, or never timed."""
    faults = []
    places: dict[Path, Path] = {}
    named, mode = judged[0][0], judged[0][1]["run_mode"]
    for folder, run, _ in judged:
        before = places.setdefault(folder.resolve(), folder)
        if before is not folder:
            faults.append(f"{folder} is the run of {before}: each run counts once")
        elif run["run_mode"] != mode:
            faults.append(f"{folder} is of RUN_MODE={run['run_mode']}, {named} of {mode}: curves are of one mode")
        elif not any(slowest(variant["step_seconds"]) for variant in run["variants"]):
            faults.append(f"{folder} timed no step (verdict {run['verdict']}): it has no point on a curve")
    return faults
