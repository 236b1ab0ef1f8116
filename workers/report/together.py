"""Runs of one mode drawn together: curves over WORLD_SIZE, the same numbers in a table, and in what the runs differ."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from workers.report import charts
from workers.report.claims import Run
from workers.report.judge import first
from workers.report.lines import write_atomically
from workers.report.markup import Markup, chip, code, document, grid, section, table, text
from workers.report.page import shown
from workers.report.records import Ranks
from workers.report.scaling import Point, Seen, differing, scaling
from workers.report.sentences import headline, repeat_command
from workers.report.units import byte_unit, human_bytes, milliseconds, three_digits

PAGE = "together.html"
Judged = tuple[str, Run, Ranks]  # the name it goes by on the page, the verdict, the records


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


def together(judged: Sequence[Judged]) -> str:
    """The whole page as HTML."""
    ordered = sorted(judged, key=lambda each: int(each[1]["world_size"]))
    runs = [run for _, run, _ in ordered]
    title = f"{len(runs)} runs of {runs[0]['run_mode']} together"
    repeated = [Markup(f'<pre class="command">{text(repeat_command(records))}</pre>') for _, _, records in ordered]
    body = [charts.look(), _head(title, ordered), _runs(ordered), curves(runs), section("Repeat them", *repeated)]
    return document(title, body)


def _head(title: str, judged: Sequence[Judged]) -> Markup:
    sizes = dict.fromkeys(str(run["world_size"]) for _, run, _ in judged)
    models = dict.fromkeys(first(records).title for _, _, records in judged)
    what = f"WORLD_SIZE {', '.join(sizes)} · {', '.join(models)}"
    return Markup(f'<header class="plain"><h1>{text(title)}</h1><p class="sub">{text(what)}</p></header>')


def _runs(judged: Sequence[Judged]) -> Markup:
    """A row a run, with what it has for each setting in which they differ."""
    different = differing([run for _, run, _ in judged])
    sentence = (
        f"These runs differ in more than WORLD_SIZE: {', '.join(different)}. A curve through them shows that too."
        if different
        else "Settings and versions are alike, WORLD_SIZE and LAB_SEED apart."
    )
    settings = [name for name in different if any(name in run["config"] for _, run, _ in judged)]
    rows = [
        [name, chip(run["verdict"].upper()), run["world_size"], *(shown(run["config"].get(s)) for s in settings), told]
        for name, run, _ in judged
        for told in [headline(run)]
    ]
    columns = ["run", "", "WORLD_SIZE", *(code(name) for name in settings), ""]
    return section("The runs", Markup(f"<p>{text(sentence)}</p>"), table(columns, rows, numbers=(2,)))


def curves(runs: Sequence[Run]) -> Markup:
    """What each variant costs over WORLD_SIZE: four charts where there are two sizes at least, and the table."""
    found = scaling(runs)
    sizes = sorted({run["world_size"] for run in runs})
    most = max((point.num_runs for of_variant in found.values() for point in of_variant), default=0)
    note = (
        "Samples a second: LAB_BATCH over the median step of the slowest rank. Efficiency: samples a second of N ranks"
        " over N/n times those of n, the variant's smallest WORLD_SIZE; dotted is the ideal."
    )
    note += f" Several runs of one WORLD_SIZE, here up to {most}, count by their median." if most > 1 else ""
    drawn = grid(_charts(found, sizes), 24) if len(sizes) > 1 and found else ""
    return section("Over WORLD_SIZE", drawn, _table(found), _skipped(runs), note=note)


def _charts(found: dict[str, list[Point]], sizes: list[int]) -> Iterator[str]:
    """A figure each of speed, efficiency, bytes and memory; of what no run measured there is none."""
    ideal: charts.Curve = (sizes, [1.0] * len(sizes))
    yield from _chart("samples a second", found, lambda point: point.seen.samples_per_s)
    yield from _chart("efficiency", found, lambda point: point.efficiency, {"ideal": ideal})
    yield from _byte_chart("on the wire a step, from the rank that sends most", found, lambda seen: seen.wire_bytes)
    yield from _byte_chart("at the peak, on the rank that holds most", found, lambda seen: seen.peak_bytes)


def _byte_chart(what: str, found: dict[str, list[Point]], nbytes: Callable[[Seen], float | None]) -> Iterator[str]:
    """A chart of bytes, in the unit of the largest of them."""
    scale, unit = byte_unit(max(nbytes(point.seen) or 0 for of_variant in found.values() for point in of_variant))

    def scaled(point: Point) -> float | None:
        value = nbytes(point.seen)
        return None if value is None else value / scale

    return _chart(f"{unit} {what}", found, scaled)


def _chart(
    title: str,
    found: dict[str, list[Point]],
    value: Callable[[Point], float | None],
    dotted: Mapping[str, charts.Curve] = MappingProxyType({}),
) -> Iterator[str]:
    """The figure of one value, with a curve a variant that has any."""
    measured = {
        name: [(point.world_size, y) for point in of_variant if (y := value(point)) is not None]
        for name, of_variant in found.items()
    }
    lines: dict[str, charts.Curve] = {
        name: ([x for x, _ in pairs], [y for _, y in pairs]) for name, pairs in measured.items() if pairs
    }
    if lines:
        figure = charts.lines(
            {**lines, **dotted}, "WORLD_SIZE", "", charts.colours(found), points=charts.MOST_POINTS, dashed=dotted
        )
        yield f"<figcaption>{text(title)}</figcaption>{charts.drawn(figure, f'{title} over WORLD_SIZE', 300)}"


def _table(found: dict[str, list[Point]]) -> Markup:
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
    columns = ["variant", "WORLD_SIZE", "runs", "ms a step", "samples/s", "efficiency", "wire a step", "peak"]
    return table(columns, rows, numbers=range(1, 8))


def _skipped(runs: Sequence[Run]) -> Markup:
    """Which variant has no point at which WORLD_SIZE, and why."""
    rows = {(run["world_size"], skip["variant"], skip["reason"]): None for run in runs for skip in run["skipped"]}
    return table(["WORLD_SIZE", "left out", "reason"], [list(row) for row in sorted(rows)], numbers=(0,))
