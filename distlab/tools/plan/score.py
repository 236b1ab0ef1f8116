"""Compare the planner with published runs, each predicted without the rows of its own source; derive its bands.

`distlab plan --score` predicts every row of published.json, or of a user's file, with shares fitted to the other
sources (gpus.json, `left_out`), and prints per kind its error and how many rows lie inside the band of the errors of
the other sources of that kind. The errors of all sources are the band that every answer prints.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import median
from typing import Any

from distlab.lab.report.table import aligned
from distlab.lab.report.units import human_bytes, three_digits
from distlab.tools.plan.costs import cost
from distlab.tools.plan.rows import Row, job_and_layout, published

NEAR, MEMORY_NEAR = 0.25, 0.10
INSIDE = 0.9  # share of a kind's rows inside its band


@dataclass(frozen=True)
class Compared:
    """One published number and its prediction."""

    row: Row
    what: str  # step, peak, rest, activations
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1

    @property
    def factor(self) -> float:
        return max(self.predicted / self.measured, self.measured / self.predicted)

    @property
    def kind(self) -> str:
        return self.row.shape.kind(fp8=self.row.fp8) if self.what == "step" else "memory"


def compared(rows: Iterable[Row]) -> list[Compared]:
    """Return every published number with its prediction, in the order of the rows."""
    found = []
    for row in rows:
        priced = cost(*job_and_layout(row, row.left_out))
        rest = sum(priced.memory[name] for name in ("parameters", "gradients", "optimizer"))
        kept = priced.memory["activations"]
        predicted = {"step": priced.step_s, "peak": priced.held_bytes, "rest": rest, "activations": kept}
        measured = (row.step_s, row.peak_bytes, row.rest_bytes, row.activation_bytes)
        numbers = zip(predicted.items(), measured, strict=True)
        found += [Compared(row, what, planned, told) for (what, planned), told in numbers if told is not None]
    return found


# Bands.


def band_of(found: Iterable[Compared], kind: str, without: str = "") -> float:
    """Return the factor within which nine of ten predictions of a kind lie, or of any kind if no other source has it.
    Memory counts only rows with published types."""
    others = [each for each in found if each.row.publication != without and each.row.dtypes | (each.kind != "memory")]
    near = sorted(each.factor for each in others if each.kind == kind) or sorted(each.factor for each in others)
    return near[min(len(near) - 1, math.ceil(INSIDE * (len(near) + 1)) - 1)]


def bands() -> dict[str, float]:
    """Return the bands by kind, as `python -m benchmarks.plan_fit` writes them to gpus.json."""
    return {kind: round(band_of(known_errors(), kind), 2) for kind in sorted({each.kind for each in known_errors()})}


@cache
def known_errors() -> list[Compared]:
    return compared(published())


def inside(each: Compared) -> bool:
    """Return whether the measured number lies in the band of the other sources."""
    return each.factor <= band_of(known_errors(), each.kind, each.row.left_out)


# Output.


def groups(found: Sequence[Compared]) -> dict[str, list[Compared]]:
    """Return rows by name: steps by card and software, all memory, then steps by kind of model and all steps."""
    named: dict[str, list[Compared]] = {}
    for each in found:
        card = f"{each.row.gpu} {each.row.software}".strip()
        known = "known" if each.row.dtypes else "unknown"
        steps = ("step", f"step, {each.kind}", f"step, {card}")
        for name in steps if each.what == "step" else (f"memory, types {known}",):
            named.setdefault(name, []).append(each)
    kinds = ("step, dense", "step, experts")
    return dict(sorted(named.items(), key=lambda each: (each[0] == "step", each[0].startswith(kinds), each[0][0] == "m", each[0])))  # fmt: skip


def summary(found: Sequence[Compared]) -> dict[str, Any]:
    """Return the rows' median error, its sign, and how many are near and inside their bands."""
    near = NEAR if found[0].what == "step" else MEMORY_NEAR
    errors = [each.error for each in found]
    return {
        "rows": len(found), "median": median(map(abs, errors)), "signed": median(errors), "near": near,
        "within": sum(abs(error) <= near for error in errors), "inside": sum(map(inside, found)), "worst": max(errors, key=abs),
    }  # fmt: skip


def score_lines(rows: Sequence[Row], questions: Sequence[str] = ()) -> list[str]:
    """Return a table of steps and one of memory, worst first, missing fields, and sums by kind."""
    found = compared(rows)
    steps = [each for each in found if each.what == "step"]
    memory = [each for each in found if each.what != "step"]
    sums = [
        [name, sums["rows"], f"{sums['median']:.1%}", f"{sums['signed']:+.1%}", f"{sums['within']} in {sums['near']:.0%}",
         sums["inside"], f"{sums['worst']:+.0%}"]
        for name, sums in ((name, summary(each)) for name, each in groups(found).items())
    ]  # fmt: skip
    return [
        *table_of(steps, three_digits), "", *([*table_of(memory, human_bytes), ""] if memory else []),
        *(f"asked      {words}" for words in questions),
        *aligned(["each without its own source", "rows", "median", "signed", "near", "in band", "worst"], sums),
    ]  # fmt: skip


def table_of(found: Sequence[Compared], shown: Callable[[float], str]) -> list[str]:
    rows = [
        [each.row.name, each.what, shown(each.predicted), shown(each.measured), f"{each.error:+.0%}", "yes" if inside(each) else "no"]
        for each in sorted(found, key=lambda each: -each.factor)
    ]  # fmt: skip
    return aligned(["row", "of", "planned", "measured", "error", "in band"], rows)


def score_json(rows: Sequence[Row], questions: Sequence[str] = ()) -> dict[str, Any]:
    """Return the score with all numbers, for JSON."""
    found = compared(rows)
    return {
        "asked": list(questions),
        "kinds": {name: summary(each) for name, each in groups(found).items()},
        "rows": [
            {
                "name": each.row.name, "source": each.row.source, "left_out": each.row.left_out, "of": each.what,
                "kind": each.kind, "software": each.row.software, "predicted": each.predicted, "measured": each.measured,
                "error": each.error, "band": band_of(known_errors(), each.kind, each.row.left_out), "inside": inside(each),
            }
            for each in found
        ],
    }  # fmt: skip
