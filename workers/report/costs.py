"""What a run cost, as the page draws it: bytes by rank and from rank to rank, and the time of a step."""

from typing import NamedTuple

from workers.report import charts
from workers.report.charts import Drawing
from workers.report.claims import Run
from workers.report.records import Comparison, Ranks, Steps, Wire, select
from workers.report.units import byte_unit

MATRIX_RANKS = 16  # rows and columns of who sends to whom: of 64 ranks three figures had 230 kB of cells
SOURCES = {"predicted": charts.PREDICTED, "called": charts.CALLED, "wire": charts.WIRE}


class Matrix(NamedTuple):
    """Bytes from each rank to each other, in one unit: (what is written, how strong its ground is in per cent)."""

    unit: str
    rows: list[list[tuple[str, int]]]
    least_rem: float  # its least width


class Traffic(NamedTuple):
    """Bytes of one variant: by rank, and who sent how much to whom where that was counted."""

    variant: str
    chart: Drawing
    matrix: Matrix | None


def traffic(run: Run, records: Ranks) -> list[Traffic]:
    """Predicted, called and wire bytes of each rank, and who sent how much to whom, by variant."""
    bars = {variant["name"]: _bars(variant, run, records) for variant in run["variants"]}
    bars = {
        name: rows for name, rows in bars.items() if any(value is not None for row in rows.values() for value in row)
    }
    top = max((value or 0 for rows in bars.values() for row in rows.values() for value in row), default=0)
    sent = _sent(records)
    most = max((value for cells in sent.values() for value in cells.values()), default=0)
    shown = min(run["world_size"], MATRIX_RANKS)
    return [
        Traffic(
            name,
            charts.drawn(charts.rank_bars(rows, SOURCES, top), f"bytes a step by rank, {name}", 190),
            _matrix(sent[name], shown, most) if name in sent else None,
        )
        for name, rows in bars.items()
    ]


def _bars(variant: Run, run: Run, records: Ranks) -> dict[str, list[float | None]]:
    """Predicted, called and wire bytes of a variant, by rank."""
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
    """Wire bytes a step from rank to rank, by variant."""
    found: dict[str, dict[tuple[int, int], float]] = {}
    for rank, wire in select(records, Wire):
        cells = found.setdefault(wire.variant, {})
        cells[rank, wire.peer] = cells.get((rank, wire.peer), 0) + wire.sent_bytes
    return found


def _matrix(cells: dict[tuple[int, int], float], world_size: int, most: float) -> Matrix:
    """Rows send, columns receive; the stronger the ground, the more bytes."""
    scale, unit = byte_unit(most)

    def cell(sent: float | None) -> tuple[str, int]:
        if not sent:
            return "" if sent is None else "·", 0
        digits = 0 if sent >= 100 * scale or scale == 1 else 1 if sent >= 10 * scale else 2
        return f"{sent / scale:.{digits}f}", round(35 * sent / most)

    ranks = range(world_size)
    # Eight ranks still fit into a phone of 390 px.
    return Matrix(unit, [[cell(cells.get((sender, to))) for to in ranks] for sender in ranks], 2.4 + 2.2 * world_size)


def step_times(records: Ranks, colour: dict[str, str]) -> Drawing | None:
    """How long a step took with each variant, and its spread; None where no step was timed."""
    taken: dict[str, list[list[float]]] = {}
    for _, steps in select(records, Steps):
        taken.setdefault(steps.variant, []).append(steps.step_seconds)
    samples = {name: [1000 * max(step) for step in zip(*of_ranks, strict=False)] for name, of_ranks in taken.items()}
    samples = {name: values for name, values in samples.items() if values}
    if not samples:
        return None
    return charts.drawn(charts.spreads(samples, colour, "ms a step"), "time of a step by variant", 220)
