"""What a run cost, as sections of its page: bytes by rank and from rank to rank, time."""

from workers.report import charts
from workers.report.claims import Run
from workers.report.judge import pytorch_own, slowest
from workers.report.markup import Markup, grid, section, table, text
from workers.report.records import Comparison, Ranks, Steps, Wire, select
from workers.report.units import byte_unit, milliseconds

MATRIX_RANKS = 16  # rows and columns of who sends to whom: of 64 ranks three figures had 230 kB of cells


def traffic(run: Run, records: Ranks) -> Markup:
    """Predicted, called and wire bytes of each rank, and who sent how much to whom, a figure a variant."""
    sources = {"predicted": charts.PREDICTED, "called": charts.CALLED, "wire": charts.WIRE}
    bars = {variant["name"]: _bars(variant, run, records) for variant in run["variants"]}
    bars = {
        name: rows for name, rows in bars.items() if any(value is not None for row in rows.values() for value in row)
    }
    top = max((value or 0 for rows in bars.values() for row in rows.values() for value in row), default=0)
    matrices = _matrices(records)
    most = max((value for cells in matrices.values() for value in cells.values()), default=0)
    figures = []
    shown = min(run["world_size"], MATRIX_RANKS)
    for name, rows in bars.items():
        drawing = charts.drawn(charts.rank_bars(rows, sources, top), f"bytes a step by rank, {name}", 190)
        told = _matrix(matrices[name], shown, most) if name in matrices else ""
        figures.append(f"<figcaption>{text(name)}</figcaption>{drawing}{told}")
    key = "".join(f'<span><i style="background:{hue}"></i>{source}</span>' for source, hue in sources.items())
    note = (
        "Bytes that each rank sends in a step: by the formula, as the calls were made, and as the sockets "
        "counted them. Below, who sent how much to whom on the wire."
        + (
            f" Of {run['world_size']} ranks the first {shown} are shown; the records have all."
            if shown < run["world_size"]
            else ""
        )
    )
    return (
        section("Bytes", f'<div class="key">{key}</div>', grid(figures, max(19, _matrix_rem(shown))), note=note)
        if figures
        else Markup()
    )


def _bars(variant: Run, run: Run, records: Ranks) -> dict[str, list[float | None]]:
    """Predicted, called and wire bytes of a variant, by rank."""
    predicted: dict[int, float] = {}
    for rank, entry in select(records, Comparison):
        if entry.variant == variant["name"] and entry.name in ("called bytes", "wire bytes"):
            predicted[rank] = entry.predicted
    every_rank = range(run["world_size"])
    return {
        "predicted": [predicted.get(rank) for rank in every_rank],
        "called": variant["called_bytes"],
        "wire": variant["wire_bytes"],
    }


def _matrices(records: Ranks) -> dict[str, dict[tuple[int, int], float]]:
    """Wire bytes a step from rank to rank, by variant."""
    found: dict[str, dict[tuple[int, int], float]] = {}
    for rank, wire in select(records, Wire):
        cells = found.setdefault(wire.variant, {})
        cells[rank, wire.peer] = cells.get((rank, wire.peer), 0) + wire.sent_bytes
    return found


def _matrix(cells: dict[tuple[int, int], float], world_size: int, most: float) -> str:
    """Rows send, columns receive, all in one unit; the stronger the ground, the more bytes."""
    scale, unit = byte_unit(most)

    def cell(sender: int, receiver: int) -> str:
        sent = cells.get((sender, receiver))
        if sent is None:
            return "<td></td>"
        value = sent / scale
        digits = 0 if value >= 100 or scale == 1 else 1 if value >= 10 else 2
        shown, share = f"{value:.{digits}f}" if sent else "·", f"{35 * sent / (most or 1):.0f}"
        return f'<td style="--share:{share}%">{shown}</td>' if share != "0" else f"<td>{shown}</td>"

    ranks = range(world_size)
    head = "".join(f"<th>{receiver}</th>" for receiver in ranks)
    rows = "".join(
        f"<tr><th>{sender} to</th>" + "".join(cell(sender, to) for to in ranks) + "</tr>" for sender in ranks
    )
    return (
        f'<div class="scroll matrix" tabindex="0" style="--least:{_matrix_rem(world_size):.1f}rem"><table>'
        f"<thead><tr><th>{unit}</th>{head}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _matrix_rem(world_size: int) -> float:
    """The least width of a matrix; eight ranks still fit into a phone of 390 px."""
    return 2.4 + 2.2 * world_size


def time(run: Run, records: Ranks, colour: dict[str, str]) -> Markup:
    """How long a step took with each variant, its spread, and its ratio to PyTorch's own."""
    taken: dict[str, list[list[float]]] = {}
    for _, steps in select(records, Steps):
        taken.setdefault(steps.variant, []).append(steps.step_seconds)
    samples = {name: [1000 * max(step) for step in zip(*of_ranks, strict=False)] for name, of_ranks in taken.items()}
    samples = {name: values for name, values in samples.items() if values}
    if not samples:
        return Markup()
    own = pytorch_own(run)
    timed = [variant for variant in run["variants"] if slowest(variant["step_seconds"])]
    own_s = next((slowest(variant["step_seconds"]) for variant in timed if variant["name"] == own), None)
    rows = []
    for variant in timed:
        seconds, cpu = (
            slowest(variant["step_seconds"]),
            [value for value in variant["cpu_seconds"] if value is not None],
        )
        ratio = [f"{seconds / own_s:.2f}" if seconds and own_s else ""] if own else []
        rows.append([variant["name"], milliseconds(seconds), *ratio, milliseconds(sum(cpu)) if cpu else ""])
    columns = ["variant", "ms a step", *([f"× {own}"] if own else []), "CPU ms, all ranks"]
    figure = charts.drawn(charts.spreads(samples, colour, "ms a step"), "time of a step by variant", 220)
    note = (
        "A step takes as long as its slowest rank. Boxes: quartiles; whiskers: 5th and 95th percentile; table: medians."
    )
    return section("Time", figure, table(columns, rows, numbers=range(1, len(columns))), note=note)
