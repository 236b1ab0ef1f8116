"""Two runs drawn together: the same charts on the same axes, tables side by side, and the settings that differ.

More than two are drawn by together.py, whose curves two runs have here where they are of two WORLD_SIZEs.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from workers.report import charts
from workers.report.blocks import verdict
from workers.report.charts import Drawing
from workers.report.claims import Run
from workers.report.judge import slowest
from workers.report.lines import write_atomically
from workers.report.markup import render
from workers.report.page import curves as losses
from workers.report.page import shown
from workers.report.records import Ranks
from workers.report.sentences import claim_name
from workers.report.table import Column, Table, Verdict
from workers.report.together import Judged, named, over_world_size, summary
from workers.report.units import difference, human_bytes, milliseconds

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
        runs=[summary(each) for each in both],
        differing=differing(both),
        curves=over_world_size(runs) if curved else None,
        losses=loss_chart(both, variants),
        bars=[found for each in BARS if (found := bars(*each, variants, both))],
        checks=checks(both),
    )


def differing(both: Both) -> Table:
    """Settings and versions in which the runs are not alike."""
    (old_name, old, _), (new_name, new, _) = both
    rows = [
        [name, shown(old[kind].get(name)), shown(new[kind].get(name))]
        for kind in ("config", "versions")
        for name in dict.fromkeys([*old[kind], *new[kind]])
        if old[kind].get(name) != new[kind].get(name)
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
    figure = charts.lines(found, "step", "loss", hues, points=charts.MOST_POINTS // len(found), dashed=dotted)
    return charts.drawn(figure, "losses of both runs by step", 380)


class Bars(NamedTuple):
    """One number a variant and run: the chart, and the table with the ratio."""

    title: str
    note: str
    chart: Drawing
    table: Table


def bars(title: str, note: str, kind: str, scale: float, variants: list[str], both: Both) -> Bars | None:
    """Of one field of run.json; None where neither run measured it."""
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
    chart = charts.drawn(charts.pairs(names, values), f"{title} of both runs", 110 + 52 * len(names))
    columns = [Column("variant"), *(Column(name, "number") for name in (both[0][0], both[1][0], "ratio"))]
    return Bars(title, note, chart, Table(columns, rows))


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


def seen(claim: dict[str, Any] | None) -> Iterator[Any]:
    """What a claim measured, and whether it held; blanks of one that was not made."""
    if claim is None:
        yield from ("", "")
    elif "max_abs_diff" in claim:
        yield from (difference(claim["max_abs_diff"]), Verdict(verdict([claim])))
    else:
        value = human_bytes(claim["measured"]) if claim["unit"] == "B" else f"{claim['measured']:.4g} {claim['unit']}"
        yield from (value, Verdict(verdict([claim])))
