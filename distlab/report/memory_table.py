"""What a run held in memory, as the page draws it: by class at rest, at the peak and over a step, and rank by rank."""

import math

from distlab.report import charts
from distlab.report.charts import Drawing
from distlab.report.records import MemoryLine, Ranks, Run, select
from distlab.report.table import Column, Table
from distlab.report.tables import fullest, ranks
from distlab.report.units import byte_unit, human_bytes
from distlab.report.verdict import slowest

CLASSES = ("parameters", "gradients", "optimizer", "activations", "communication")
COLOURS = dict(zip(CLASSES, (charts.PALETTE[index] for index in (0, 2, 3, 1, 5)), strict=True))
MOST_PARTS = 600  # of all lines over a step together: 14 variants of 200 parts each took a fifth of the page
KINDS = {
    "rest_bytes": "At rest",
    "peak_bytes": "At most in the whole pass: its making, and what was there before, included",
    "activation_bytes": "Activations kept for the backward pass, at most",
}


def by_class(run: Run) -> Drawing | None:
    """Bars of each variant's fullest rank, at rest and at the peak; None where no rank counted by class."""
    rows = {}
    for variant in run["variants"]:
        rank = fullest(variant["peak_by_class"])
        if rank is not None:
            rows[f"{variant['name']} · rest"] = variant["rest_by_class"][rank]
            rows[f"{variant['name']} · peak"] = variant["peak_by_class"][rank]
    if not rows:
        return None
    return charts.render_chart(
        charts.layers(rows, COLOURS), "memory by class, at rest and at the peak", 50 + 30 * len(rows)
    )


def over_the_step(records: Ranks) -> dict[str, Drawing]:
    """A figure a variant, all on one scale of bytes."""
    lines: dict[str, MemoryLine] = {}
    for _, line in select(records, MemoryLine):
        lines[line.variant] = max(line, lines.get(line.variant, line), key=_most)
    scale, unit = byte_unit(max(map(_most, lines.values()), default=0))
    top = max(map(_most, lines.values()), default=0) / scale
    figures = {}
    for name, line in lines.items():
        coarse = coarser(line.held_bytes, MOST_PARTS // len(lines))
        held = {kind: [nbytes / scale for nbytes in values] for kind, values in coarse.items() if any(values)}
        figure = charts.stacked(held, 1000 * line.step_s, COLOURS, unit, top)
        figures[name] = charts.render_chart(figure, f"memory over a step of {name}", 220)
    return figures


def coarser(held_bytes: dict[str, list[int]], parts: int) -> dict[str, list[int]]:
    """The line in at most so many parts: of those that become one the part that held most, so that the peak stays."""
    columns = list(zip(*held_bytes.values(), strict=True))
    step = max(1, math.ceil(len(columns) / parts))
    kept = [max(columns[start : start + step], key=sum) for start in range(0, len(columns), step)]
    return {kind: [column[index] for column in kept] for index, kind in enumerate(held_bytes)}


def _most(line: MemoryLine) -> int:
    return max((sum(part) for part in zip(*line.held_bytes.values(), strict=True)), default=0)


def by_rank(run: Run) -> dict[str, Table]:
    """By heading a row a variant and a column a rank; none where no rank wrote that kind."""
    found = {}
    for kind, heading in KINDS.items():
        rows = [
            [variant["name"], *("" if nbytes is None else human_bytes(nbytes) for nbytes in variant[kind])]
            for variant in run["variants"]
            if slowest(variant[kind]) is not None
        ]
        if rows:
            found[heading] = Table([Column("variant"), *ranks(run, "number")], rows)
    return found
