"""Two runs drawn together: the same charts on the same axes, tables side by side, and the settings that differ.

More than two are drawn together, whose curves two runs have here where they are of two WORLD_SIZEs.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from distlab.report import charts
from distlab.report.charts import Drawing
from distlab.report.html import render
from distlab.report.page import curves as losses
from distlab.report.page import setting_text
from distlab.report.reading import write_atomically
from distlab.report.records import Ranks, Run
from distlab.report.sentences import claim_name, headline, repeat_command
from distlab.report.table import Column, Table, Verdict
from distlab.report.tables import verdict
from distlab.report.units import byte_unit, counted, difference, human_bytes, milliseconds, three_digits
from distlab.report.verdict import first, slowest

# Several runs of one mode as curves over WORLD_SIZE: what a step costs each variant on more and more ranks.
#
# Efficiency is the samples a second of N ranks over N/n times those of n ranks, where n is the smallest WORLD_SIZE at
# which the variant was timed: at 1 every further rank does all of its share.

# Who a rank is and where its files go says nothing of what is run; WORLD_SIZE and LAB_SEED are there to differ.
OF_NO_ACCOUNT = (
    "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "LAB_RUN_ID", "LAB_RUNS_DIR", "WORLD_SIZE", "LAB_SEED",
)  # fmt: skip


class MeasuredVariant(NamedTuple):
    """What one run says of a variant, None for what it did not measure."""

    step_s: float  # the slowest rank's median
    samples_per_s: float
    wire_bytes: float | None  # a step, of the rank that sends most
    peak_bytes: float | None  # of the rank that holds most


class Point(NamedTuple):
    """A variant at one WORLD_SIZE: the medians over its runs there."""

    world_size: int
    num_runs: int
    seen: MeasuredVariant
    efficiency: float


def scaling(runs: Sequence[Run]) -> dict[str, list[Point]]:
    """By variant its points, the smallest WORLD_SIZE first; a variant that no run timed has none."""
    found: dict[str, dict[int, list[MeasuredVariant]]] = {}
    for run in sorted(runs, key=lambda run: int(run["world_size"])):
        for variant in run["variants"]:
            if step_s := slowest(variant["step_seconds"]):
                rate, wire, peak = run["config"]["LAB_BATCH"] / step_s, variant["wire_bytes"], variant["peak_bytes"]
                seen = MeasuredVariant(step_s, rate, slowest(wire), slowest(peak))
                found.setdefault(variant["name"], {}).setdefault(run["world_size"], []).append(seen)
    return {name: list(points(by_size)) for name, by_size in found.items()}


def points(by_size: dict[int, list[MeasuredVariant]]) -> Iterable[Point]:
    """One variant's points, of what its runs at each WORLD_SIZE say, the smallest first."""
    merged = {size: middle(seen) for size, seen in by_size.items()}
    least = next(iter(merged))
    for size, seen in merged.items():
        ideal = merged[least].samples_per_s * size / least
        yield Point(size, len(by_size[size]), seen, seen.samples_per_s / ideal)


def middle(seen: Sequence[MeasuredVariant]) -> MeasuredVariant:
    """The median of each number."""
    known = ([value for value in values if value is not None] for values in zip(*seen, strict=True))
    return MeasuredVariant(*(median(values) if values else None for values in known))  # type: ignore[arg-type]


def unlike(runs: Sequence[Run]) -> list[tuple[str, str]]:
    """The settings ("config") and "versions" in which these runs are not all alike, by kind and name."""
    return [
        (kind, name)
        for kind in ("config", "versions")
        for name in dict.fromkeys(name for run in runs for name in run[kind])
        if any(run[kind].get(name) != runs[0][kind].get(name) for run in runs)
    ]


def differing(runs: Sequence[Run]) -> list[str]:
    """The same in words, without those that say nothing of what is run."""
    named = [(kind, name) for kind, name in unlike(runs) if name not in OF_NO_ACCOUNT]
    return [name if kind == "config" else f"the version of {name}" for kind, name in named]


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


# Runs of one mode drawn together: curves over WORLD_SIZE, the same numbers in a table, and in what the runs differ.

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
            *(setting_text(run["config"].get(setting)) for setting in settings), headline(run),
        ]
        for name, run, _ in judged
    ]  # fmt: skip
    return Table([Column("run"), Column(""), Column("WORLD_SIZE", "number"), *map(Column, settings), Column("")], rows)


def over_world_size(runs: Sequence[Run]) -> dict[str, Any]:
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
    return {"note": note, "charts": shown, "points": points_table(found), "skipped": skipped(runs)}


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
        figure = charts.line_chart(
            lines | ideal, "WORLD_SIZE", "", charts.colours(found), points=charts.MOST_POINTS, dashed=ideal
        )
        yield charts.render_chart(figure, f"{unit} {what} over WORLD_SIZE".strip(), 300)


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


Both = tuple[Judged, Judged]
# What is compared of each variant: heading, what its numbers are, the field of run.json, and its scale in the chart.
BARS: tuple[tuple[str, str, str, float], ...] = (
    ("Time", "Milliseconds a step: the slowest rank's median.", "step_seconds", 1000),
    ("Bytes on the wire", "MB a step, from the rank that sends most.", "wire_bytes", 1e-6),
    ("Memory", "MB at the peak, on the rank that holds most.", "peak_bytes", 1e-6),
    ("Memory at rest", "MB between two steps, on the rank that holds most.", "rest_bytes", 1e-6),
)


def write_comparison(old: tuple[Path, Run, Ranks], new: tuple[Path, Run, Ranks]) -> Path:
    """Write `compare-<old>.html` into the folder of the new run; returns its path."""
    path = new[0] / f"compare-{old[0].resolve().name}.html"
    write_atomically(path, [comparison(*named([old, new]))])
    return path


def comparison(old: Judged, new: Judged) -> str:
    """The whole page as HTML."""
    both, runs = (old, new), (old[1], new[1])
    variants = list(dict.fromkeys(variant["name"] for run in runs for variant in run["variants"]))
    curved = len({run["run_mode"] for run in runs}) == 1 and len({run["world_size"] for run in runs}) == 2
    return render(
        "compare.html",
        names=[old[0], new[0]],
        runs=[
            {
                "name": name,
                "verdict": run["verdict"].upper(),
                "what": f"{run['run_mode']} · {counted(run['world_size'], 'ranks')} · {first(records).title}",
                "headline": headline(run),
                "command": repeat_command(records),
            }
            for name, run, records in both
        ],
        differing=differing_settings(both),
        curves=over_world_size(runs) if curved else None,
        losses=loss_chart(both, variants),
        bars=[found for each in BARS if (found := bars(*each, variants, both))],
        checks=checks(both),
    )


def differing_settings(both: Both) -> Table:
    """Settings and versions in which the runs are not alike."""
    (old_name, old, _), (new_name, new, _) = both
    rows = [
        [name, setting_text(old[kind].get(name)), setting_text(new[kind].get(name))]
        for kind, name in unlike([old, new])
    ]
    return Table([Column("setting"), Column(old_name), Column(new_name)], rows)


def loss_chart(both: Both, variants: list[str]) -> Drawing | None:
    """The old run dotted, the new one solid, a variant in its colour."""
    found = {f"{variant} · {name}": curve for name, _, records in both for variant, curve in losses(records).items()}
    if not found:
        return None
    hues = charts.colours(variants)
    hues = {label: hues.get(label.split(" · ")[0], charts.GREY) for label in found}
    dotted = [label for label in found if label.endswith(f" · {both[0][0]}")]
    figure = charts.line_chart(found, "step", "loss", hues, points=charts.MOST_POINTS // len(found), dashed=dotted)
    return charts.render_chart(figure, "losses of both runs by step", 380)


def bars(title: str, note: str, kind: str, scale: float, variants: list[str], both: Both) -> dict[str, Any] | None:
    """One field of run.json, a number a variant and run, as a chart and as a table with the ratio; None where neither
    run measured it."""
    found = [{variant["name"]: slowest(variant[kind]) for variant in run["variants"]} for _, run, _ in both]
    names = [name for name in variants if found[0].get(name) or found[1].get(name)]
    if not names:
        return None
    write = milliseconds if kind == "step_seconds" else human_bytes
    rows = []
    for name in names:
        old, new = found[0].get(name), found[1].get(name)
        rows.append([name, write(old), write(new), f"{new / old:.2f}" if old and new else ""])
    values = {
        run_name: [None if (value := row.get(name)) is None else scale * value for name in names]
        for (run_name, _, _), row in zip(both, found, strict=True)
    }
    chart = charts.render_chart(charts.pairs(names, values), f"{title} of both runs", 110 + 52 * len(names))
    columns = [Column("variant"), *(Column(name, "number") for name in (both[0][0], both[1][0], "ratio"))]
    return {"title": title, "note": note, "chart": chart, "table": Table(columns, rows)}


def checks(both: Both) -> Table:
    """Every check and comparison of either run."""
    claims = [{claim_name(claim): claim for claim in run["checks"] + run["comparisons"]} for _, run, _ in both]
    rows = [
        [name, *(cell for of in claims for cell in seen(of.get(name)))]
        for name in dict.fromkeys([*claims[0], *claims[1]])
    ]
    columns = [Column("check")]
    for name, _, _ in both:
        columns += [Column(name, "value"), Column("")]
    return Table(columns, rows)


def seen(claim: Run | None) -> tuple[Any, Any]:
    """What a claim measured, and whether it held; blanks of one that was not made."""
    if claim is None:
        return "", ""
    if "max_abs_diff" in claim:
        value = difference(claim["max_abs_diff"])
    else:
        value = human_bytes(claim["measured"]) if claim["unit"] == "B" else f"{claim['measured']:.4g} {claim['unit']}"
    return value, Verdict(verdict([claim]))
