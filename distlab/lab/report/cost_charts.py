"""Charts of a run's costs: bytes by rank and between ranks, step times, and memory by class and over a step."""

import math
from typing import Any

from distlab.lab.report import charts
from distlab.lab.report.charts import Drawing
from distlab.lab.report.records import Comparison, MemoryLine, Ranks, Run, Steps, Wire, select
from distlab.lab.report.table import Column, Table
from distlab.lab.report.tables import fullest, ranks
from distlab.lab.report.units import byte_unit, human_bytes
from distlab.lab.report.verdict import slowest

MATRIX_RANKS = 16  # the largest matrix of senders and receivers: of 64 ranks three figures had 230 kB of cells
SOURCES = {"predicted": charts.PREDICTED, "called": charts.CALLED, "wire": charts.WIRE}


def traffic(run: Run, records: Ranks) -> list[dict[str, Any]]:
    """Return by variant each rank's predicted, called and sent bytes, and the bytes between ranks if counted."""
    every = {variant["name"]: _bars(variant, run, records) for variant in run["variants"]}
    bars = {name: rows for name, rows in every.items() if any(slowest(row) is not None for row in rows.values())}
    top = max((value or 0 for rows in bars.values() for row in rows.values() for value in row), default=0)
    sent = _sent(records)
    most = max((value for cells in sent.values() for value in cells.values()), default=0)
    shown = min(run["world_size"], MATRIX_RANKS)
    return [
        {
            "variant": name,
            "chart": charts.render_chart(charts.rank_bars(rows, SOURCES, top), f"bytes per step by rank, {name}", 190),
            "matrix": _matrix(sent[name], shown, most) if name in sent else None,
        }
        for name, rows in bars.items()
    ]


def _bars(variant: Run, run: Run, records: Ranks) -> dict[str, list[float | None]]:
    """Return a variant's predicted, called and sent bytes by rank."""
    predicted: dict[int, float] = {}
    for rank, entry in select(records, Comparison):
        if entry.variant == variant["name"] and entry.name in ("called bytes", "wire bytes"):
            predicted[rank] = entry.predicted
    return {
        "predicted": [predicted.get(rank) for rank in range(run["world_size"])],
        "called": variant["called_bytes"],
        "wire": variant["wire_bytes"],
    }


def _sent(records: Ranks) -> dict[str, dict[tuple[int, int], float]]:
    """Return the bytes on the wire per step from rank to rank, by variant."""
    found: dict[str, dict[tuple[int, int], float]] = {}
    for rank, wire in select(records, Wire):
        cells = found.setdefault(wire.variant, {})
        cells[rank, wire.peer] = cells.get((rank, wire.peer), 0) + wire.sent_bytes
    return found


def _matrix(cells: dict[tuple[int, int], float], world_size: int, most: float) -> dict[str, Any]:
    """Return a matrix, rows send and columns receive: (text, background strength in per cent), stronger for more
    bytes."""
    scale, unit = byte_unit(most)

    def cell(sent: float | None) -> tuple[str, int]:
        if not sent:
            return "" if sent is None else "·", 0
        digits = 0 if sent >= 100 * scale or scale == 1 else 1 if sent >= 10 * scale else 2
        return f"{sent / scale:.{digits}f}", round(35 * sent / most)

    ranks = range(world_size)
    rows = [[cell(cells.get((sender, to))) for to in ranks] for sender in ranks]
    return {"unit": unit, "rows": rows, "least_rem": 2.4 + 2.2 * world_size}  # 8 ranks fit on a phone of 390 px


def step_times(records: Ranks, colour: dict[str, str]) -> Drawing | None:
    """Draw the spread of each variant's step times; None if no step was timed."""
    found = {name: [1000 * step_s for step_s in values] for name, values in samples(records).items()}
    if not found:
        return None
    return charts.render_chart(charts.spreads(found, colour, "ms per step"), "time of a step by variant", 220)


def samples(records: Ranks) -> dict[str, list[float]]:
    """Return by variant each timed step's seconds on its slowest rank."""
    by_variant: dict[str, list[list[float]]] = {}
    for _, steps in select(records, Steps):
        by_variant.setdefault(steps.variant, []).append(steps.step_seconds)
    found = {name: [max(step) for step in zip(*of_ranks, strict=False)] for name, of_ranks in by_variant.items()}
    return {name: values for name, values in found.items() if values}


# Memory, by class at rest, at the peak and over a step, and rank by rank.

COLOUR_OF_CLASS = {"parameters": 0, "gradients": 2, "optimizer": 3, "activations": 1, "communication": 5}
MEMORY_COLOURS = {name: charts.PALETTE[place] for name, place in COLOUR_OF_CLASS.items()}
MOST_PARTS = 600  # of all lines over a step: 14 variants of 200 parts each took a fifth of the page
MEMORY_HEADINGS = {
    "rest_bytes": "At rest",
    "peak_bytes": "Peak of the whole pass, with its construction and what existed before",
    "activation_bytes": "Peak of the activations that are kept for the backward pass",
}


def memory_by_class(run: Run) -> Drawing | None:
    """Draw bars of each variant's fullest rank, at rest and at the peak; None if no rank counted by class."""
    rows = {}
    for variant in run["variants"]:
        rank = fullest(variant["peak_by_class"])
        if rank is not None:
            rows[f"{variant['name']} · rest"] = variant["rest_by_class"][rank]
            rows[f"{variant['name']} · peak"] = variant["peak_by_class"][rank]
    if not rows:
        return None
    return charts.render_chart(
        charts.layers(rows, MEMORY_COLOURS), "memory by class, at rest and at the peak", 50 + 30 * len(rows)
    )


def memory_over_the_step(records: Ranks) -> dict[str, Drawing]:
    """Draw one figure per variant, with the same scale of bytes."""
    lines: dict[str, MemoryLine] = {}
    for _, line in select(records, MemoryLine):
        lines[line.variant] = max(line, lines.get(line.variant, line), key=_most)
    most = max(map(_most, lines.values()), default=0)
    scale, unit = byte_unit(most)
    figures = {}
    for name, line in lines.items():
        coarse = coarser(line.held_bytes, MOST_PARTS // len(lines))
        amounts = {kind: [nbytes / scale for nbytes in values] for kind, values in coarse.items() if any(values)}
        figure = charts.stacked(amounts, 1000 * line.step_s, MEMORY_COLOURS, unit, most / scale)
        figures[name] = charts.render_chart(figure, f"memory over a step of {name}", 220)
    return figures


def coarser(held_bytes: dict[str, list[int]], parts: int) -> dict[str, list[int]]:
    """Merge a line into at most `parts` parts; each gets the fullest of its parts, so the peak stays."""
    columns = list(zip(*held_bytes.values(), strict=True))
    step = max(1, math.ceil(len(columns) / parts))
    kept = [max(columns[start : start + step], key=sum) for start in range(0, len(columns), step)]
    return {kind: [column[index] for column in kept] for index, kind in enumerate(held_bytes)}


def _most(line: MemoryLine) -> int:
    return max((sum(part) for part in zip(*line.held_bytes.values(), strict=True)), default=0)


def memory_by_rank(run: Run) -> dict[str, Table]:
    """Return by heading one row per variant and one column per rank; none without such records."""
    found = {}
    for kind, heading in MEMORY_HEADINGS.items():
        rows = [
            [variant["name"], *("" if nbytes is None else human_bytes(nbytes) for nbytes in variant[kind])]
            for variant in run["variants"]
            if slowest(variant[kind]) is not None
        ]
        if rows:
            found[heading] = Table([Column("variant"), *ranks(run, "number")], rows)
    return found
