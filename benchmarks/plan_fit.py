"""The shares of GPUs' peaks, fitted to published runs, with and without each source, in the package's gpus.json.

`python -m benchmarks.plan_fit`, after a change of published.json or of the planner's formulas; `distlab plan --score`
says how far off the planner is then. Every source counts as much as another, however many rows it has, and every row by
the logarithm of predicted over measured; a little is added for shares that lie far from USUAL, which decides what few
rows leave open.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any

from distlab.lab.report.reading import write_atomically
from distlab.tools.plan import gpu, score
from distlab.tools.plan.gpu import TABLE, Shares, tables
from distlab.tools.plan.job import Job
from distlab.tools.plan.layout import Layout
from distlab.tools.plan.rows import Row, job_and_layout, published
from distlab.tools.plan.step_time import step_parts

USUAL = Shares(0.65, 0.4, 0.8, 0.85, 0.6)
PULL, EXPERTS_PULL = 0.02, 0.1
GRID = {
    "matrix": [share / 100 for share in range(30, 96)],
    "attention": [share / 100 for share in range(10, 91, 5)],
    "memory": [share / 100 for share in range(30, 96, 5)],
    "fp8": [share / 100 for share in range(50, 131, 5)],
    "experts": [share / 100 for share in range(30, 101, 5)],
}
SWEEPS = 4  # over all shares, one after another


@cache
def job_of(row: Row) -> tuple[Job, Layout]:
    return job_and_layout(row)


def off(row: Row, shares: Shares) -> float:
    job, layout = job_of(row)
    step_s = sum(step_parts(replace(job, gpu=replace(job.gpu, shares=shares)), layout).values())
    assert row.step_s is not None
    return abs(math.log(step_s / row.step_s))


def mean_of_sources(rows: Sequence[Row], shares_of: Callable[[Row], Shares]) -> float:
    by_source: dict[str, list[float]] = {}
    for row in rows:
        by_source.setdefault(row.publication, []).append(off(row, shares_of(row)))
    return mean(map(mean, by_source.values()))


def fitted_shares(rows: Sequence[Row]) -> Shares:
    """Of dense models' rows; one share after another, each by its grid. Attention reaches little more of the peak than
    large products do, which keeps few rows from saying otherwise."""

    def missed(shares: Shares) -> float:
        far = sum(math.log(getattr(shares, name) / getattr(USUAL, name)) ** 2 for name in GRID)
        return mean_of_sources(rows, lambda _: shares) + PULL * far

    best = USUAL
    for _ in range(SWEEPS):
        before = best
        for name in [name for name in GRID if name != "experts"]:
            tried = [best, *(replace(best, **{name: share}) for share in GRID[name])]
            best = min((each for each in tried if each.attention <= each.matrix + 0.1), key=missed)
        if best == before:
            break
    return best


def fits(rows: Sequence[Row], chips: Sequence[str]) -> dict[str, Any]:
    """By chip, and by chip and software, what was fitted and to what; None where there are no rows."""
    found: dict[str, Any] = {}
    dense = [row for row in rows if row.step_s and not row.shape.experts]
    for chip in chips:
        for software in ("", *gpu.SOFTWARE):
            of_kind = [row for row in dense if chip_of(row) == chip and software in ("", row.software)]
            found[f"{chip} {software}".strip()] = as_row(of_kind) if of_kind else None
    return found


def as_row(rows: Sequence[Row]) -> dict[str, Any]:
    shares = fitted_shares(rows)
    sources = list(dict.fromkeys(row.publication for row in rows))
    found = {f"{name}_share": getattr(shares, name) for name in GRID if name != "experts"}
    return found | {"rows": len(rows), "sources": sources}


def chip_of(row: Row) -> str:
    chip: str = tables()["gpus"][row.gpu]["kind"]
    return chip


def expert_share(rows: Sequence[Row], kinds: dict[str, Any]) -> float:
    """What products of experts reach of what large ones do, by all mixtures' rows, with these shares of the rest. Their
    sources are few, and one has a single row: here a row counts as much as another."""
    mixtures = [row for row in rows if row.step_s and row.shape.experts]

    def shares(row: Row) -> Shares:
        found = kinds.get(f"{chip_of(row)} {row.software}") or kinds.get(chip_of(row)) or kinds[gpu.FALLBACK]
        return Shares(*(found[f"{name}_share"] for name in ("matrix", "attention", "memory", "fp8")))

    def missed(share: float) -> float:
        far = EXPERTS_PULL * math.log(share / USUAL.experts) ** 2
        return far + mean(off(row, replace(shares(row), experts=share)) for row in mixtures)

    return min(GRID["experts"], key=missed) if mixtures else USUAL.experts


def all_fits() -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """With all sources, and what differs without each: the kinds that it has rows of, or of a mixture all of them."""
    rows = published()
    chips = sorted({chip_of(row) for row in rows})
    whole = fits(rows, chips)
    share = expert_share(rows, whole)
    without: dict[str, dict[str, Any]] = {}
    for source in dict.fromkeys(row.publication for row in rows):
        others = [row for row in rows if row.publication != source]
        lost = sorted({chip_of(row) for row in rows if row.publication == source and not row.shape.experts})
        of_lost = {kind: row for kind, row in fits(others, lost).items() if whole[kind] and row != whole[kind]}
        rest = whole | of_lost
        experts = expert_share(others, rest)
        without[source] = {
            kind: row and row | {"expert_share": experts}
            for kind, row in rest.items()
            if kind in of_lost or (row and experts != share)
        }
    kinds = {kind: row | {"expert_share": share} for kind, row in whole.items() if row}
    return kinds, {source: rows for source, rows in without.items() if rows}


def fit(path: Path = TABLE) -> list[str]:
    """Fit every kind, write gpus.json with the bands that follow, and say what was found; raises OSError."""
    found = json.loads(path.read_text())
    found["fitted"], found["left_out"] = all_fits()
    write(path, found)
    tables.cache_clear()
    score.known_errors.cache_clear()
    found["bands"] = score.bands()
    write(path, found)
    tables.cache_clear()
    return [
        f"{kind}: products {row['matrix_share']:.0%}, attention {row['attention_share']:.0%} of the peak, memory"
        f" {row['memory_share']:.0%} of its rate, by {row['rows']} rows"
        for kind, row in found["fitted"].items()
    ]


def write(path: Path, found: dict[str, Any]) -> None:
    parts = [
        f' "{part}": {{\n' + ",\n".join(f'  "{name}": {json.dumps(row)}' for name, row in found[part].items()) + "\n }"
        for part in ("gpus", "fitted", "left_out", "bands")
    ]
    write_atomically(path, ["{\n" + ",\n".join(parts) + "\n}\n"])


if __name__ == "__main__":
    print("\n".join(fit()))
