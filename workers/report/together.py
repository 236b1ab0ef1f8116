"""Runs of one mode drawn together: curves over WORLD_SIZE, the same numbers in a table, and in what the runs differ."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from workers.report import charts
from workers.report.charts import Drawing
from workers.report.claims import Run
from workers.report.judge import first
from workers.report.lines import write_atomically
from workers.report.markup import render
from workers.report.page import shown
from workers.report.records import Ranks
from workers.report.scaling import Point, differing, scaling
from workers.report.sentences import headline, repeat_command
from workers.report.table import Column, Table, Verdict
from workers.report.units import byte_unit, human_bytes, milliseconds, three_digits

PAGE = "together.html"
Judged = tuple[str, Run, Ranks]  # the name it goes by on the page, the verdict, the records
# What is drawn over WORLD_SIZE: what it is, whether it is in bytes, and the value of a point.
MEASURES: tuple[tuple[str, bool, Callable[[Point], float | None]], ...] = (
    ("samples a second", False, lambda point: point.seen.samples_per_s),
    ("efficiency", False, lambda point: point.efficiency),
    ("on the wire a step, from the rank that sends most", True, lambda point: point.seen.wire_bytes),
    ("at the peak, on the rank that holds most", True, lambda point: point.seen.peak_bytes),
)


def write_together(judged: Sequence[tuple[Path, Run, Ranks]]) -> Path:
    """Write `together.html` into the folder of the last run; returns its path."""
    path = judged[-1][0] / PAGE
    write_atomically(path, [together(named(judged))])
    return path


def named(judged: Sequence[tuple[Path, Run, Ranks]]) -> list[Judged]:
    """Each run under a name that no other one has: its id, else its folder's name, else the whole path."""
    folders = [folder for folder, _, _ in judged]
    for names in ([run["run_id"] for _, run, _ in judged], [folder.resolve().name for folder in folders]):
        if len(set(names)) == len(names):
            break
    else:
        names = [str(folder) for folder in folders]
    return [(name, run, records) for name, (_, run, records) in zip(names, judged, strict=True)]


class Summary(NamedTuple):
    """A run among others."""

    name: str
    verdict: str
    what: str
    headline: str
    command: str


def summary(judged: Judged) -> Summary:
    """Of one run: under which name, what it was and what came of it."""
    name, run, records = judged
    what = f"{run['run_mode']} · {run['world_size']} ranks · {first(records).title}"
    return Summary(name, run["verdict"].upper(), what, headline(run), repeat_command(records))


def together(judged: Sequence[Judged]) -> str:
    """The whole page as HTML."""
    ordered = sorted(judged, key=lambda each: int(each[1]["world_size"]))
    runs = [run for _, run, _ in ordered]
    sizes = dict.fromkeys(str(run["world_size"]) for run in runs)
    models = dict.fromkeys(first(records).title for _, _, records in ordered)
    return render(
        "together.html",
        title=f"{len(runs)} runs of {runs[0]['run_mode']} together",
        what=f"WORLD_SIZE {', '.join(sizes)} · {', '.join(models)}",
        differing=differing(runs),
        rows=rows_of_runs(ordered),
        curves=over_world_size(runs),
        commands=[repeat_command(records) for _, _, records in ordered],
    )


def rows_of_runs(judged: Sequence[Judged]) -> Table:
    """A row a run, with what it has for each setting in which they differ."""
    different = differing([run for _, run, _ in judged])
    settings = [name for name in different if any(name in run["config"] for _, run, _ in judged)]
    rows = [
        [
            name, Verdict(run["verdict"].upper()), run["world_size"],
            *(shown(run["config"].get(setting)) for setting in settings), headline(run),
        ]
        for name, run, _ in judged
    ]  # fmt: skip
    return Table([Column("run"), Column(""), Column("WORLD_SIZE", "number"), *map(Column, settings), Column("")], rows)


class Curves(NamedTuple):
    """What variants cost over WORLD_SIZE."""

    note: str
    charts: list[Drawing]
    points: Table
    skipped: Table


def over_world_size(runs: Sequence[Run]) -> Curves:
    """What each variant costs over WORLD_SIZE: four charts where there are two sizes at least, and the table."""
    found = scaling(runs)
    sizes = sorted({run["world_size"] for run in runs})
    most = max((point.num_runs for of_variant in found.values() for point in of_variant), default=0)
    note = (
        "Samples a second: LAB_BATCH over the median step of the slowest rank. Efficiency: samples a second of N ranks"
        " over N/n times those of n, the variant's smallest WORLD_SIZE; dotted is the ideal."
    )
    note += f" Several runs of one WORLD_SIZE, here up to {most}, count by their median." if most > 1 else ""
    shown = list(drawings(found, sizes)) if len(sizes) > 1 else []
    return Curves(note, shown, points_table(found), skipped(runs))


def drawings(found: dict[str, list[Point]], sizes: list[int]) -> Iterator[Drawing]:
    """A chart each of speed, efficiency, bytes and memory, a curve a variant; of what no run measured there is none."""
    for what, of_bytes, value in MEASURES:
        measured = {
            name: [(point.world_size, y) for point in of_variant if (y := value(point)) is not None]
            for name, of_variant in found.items()
        }
        curves = {name: points for name, points in measured.items() if points}
        if not curves:
            continue
        most = max(y for points in curves.values() for _, y in points)
        scale, unit = byte_unit(most) if of_bytes else (1.0, "")
        lines: dict[str, charts.Curve] = {
            name: ([size for size, _ in points], [y / scale for _, y in points]) for name, points in curves.items()
        }
        ideal: dict[str, charts.Curve] = {"ideal": (sizes, [1.0] * len(sizes))} if what == "efficiency" else {}
        figure = charts.lines(
            lines | ideal, "WORLD_SIZE", "", charts.colours(found), points=charts.MOST_POINTS, dashed=ideal
        )
        yield charts.drawn(figure, f"{unit} {what} over WORLD_SIZE".strip(), 300)


def points_table(found: dict[str, list[Point]]) -> Table:
    """The numbers of the charts, a row a variant and WORLD_SIZE."""
    rows = [
        [
            name, point.world_size, point.num_runs, milliseconds(seen.step_s), three_digits(seen.samples_per_s),
            f"{point.efficiency:.2f}", human_bytes(seen.wire_bytes), human_bytes(seen.peak_bytes),
        ]
        for name, of_variant in found.items()
        for point in of_variant
        for seen in [point.seen]
    ]  # fmt: skip
    numbers = ("WORLD_SIZE", "runs", "ms a step", "samples/s", "efficiency", "wire a step", "peak")
    return Table([Column("variant"), *(Column(title, "number") for title in numbers)], rows)


def skipped(runs: Sequence[Run]) -> Table:
    """Which variant has no point at which WORLD_SIZE, and why."""
    rows = {(run["world_size"], skip["variant"], skip["reason"]): None for run in runs for skip in run["skipped"]}
    columns = [Column("WORLD_SIZE", "number"), Column("left out"), Column("reason")]
    return Table(columns, [list(row) for row in sorted(rows)])
