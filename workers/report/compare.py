"""Two runs drawn together: the same charts on the same axes, tables side by side, and the settings that differ.

More than two are drawn by together.py, whose curves two runs have here where they are of two WORLD_SIZEs.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from workers.report import charts
from workers.report.claims import Run
from workers.report.held import verdict_chip
from workers.report.judge import first, slowest
from workers.report.lines import write_atomically
from workers.report.markup import Markup, chip, code, document, section, table, text
from workers.report.page import curves as losses
from workers.report.page import shown
from workers.report.records import Ranks
from workers.report.sentences import headline, repeat_command
from workers.report.together import Judged, curves, named
from workers.report.units import difference, human_bytes, milliseconds


def write_comparison(old: tuple[Path, Run, Ranks], new: tuple[Path, Run, Ranks]) -> Path:
    """Write `compare-<old>.html` into the folder of the new run; returns its path."""
    path = new[0] / f"compare-{old[0].resolve().name}.html"
    write_atomically(path, [comparison(*named([old, new]))])
    return path


def comparison(old: Judged, new: Judged) -> str:
    """The whole page as HTML."""
    both = (old, new)
    variants = list(dict.fromkeys(variant["name"] for _, run, _ in both for variant in run["variants"]))
    body = [
        _head(old, new),
        _differing(both),
        _over_world_size(old[1], new[1]),
        _losses(both, variants),
        _bars("Time", "Milliseconds a step: the slowest rank's median.", variants, both, "step_seconds", 1000),
        _bars("Bytes on the wire", "MB a step, from the rank that sends most.", variants, both, "wire_bytes", 1e-6),
        _bars("Memory", "MB at the peak, on the rank that holds most.", variants, both, "peak_bytes", 1e-6),
        _bars(
            "Memory at rest", "MB between two steps, on the rank that holds most.", variants, both, "rest_bytes", 1e-6
        ),
        _checks(both),
        section(
            "Repeat them",
            *(Markup(f'<pre class="command">{text(repeat_command(records))}</pre>') for _, _, records in both),
        ),
    ]
    return document(f"{old[0]} and {new[0]}", [charts.look(), *body])


def _head(old: Judged, new: Judged) -> Markup:
    tiles = "".join(
        f'<div class="tile">{chip(run["verdict"].upper())}<b>{text(name)}</b><span>{text(what)}</span>'
        f"<span>{text(headline(run))}</span></div>"
        for name, run, records in (old, new)
        for what in [f"{run['run_mode']} · {run['world_size']} ranks · {first(records).title}"]
    )
    return Markup(f'<header class="plain"><h1>Two runs together</h1><div class="tiles two">{tiles}</div></header>')


def _differing(both: tuple[Judged, Judged]) -> Markup:
    """Settings and versions in which the runs are not alike."""
    (old_name, old, _), (new_name, new, _) = both
    rows = [
        [code(name), shown(old[kind].get(name)), shown(new[kind].get(name))]
        for kind in ("config", "versions")
        for name in dict.fromkeys([*old[kind], *new[kind]])
        if old[kind].get(name) != new[kind].get(name)
    ]
    if not rows:
        return section("What differs", Markup("<p>Nothing: settings and versions are the same.</p>"))
    return section("What differs", table(["setting", old_name, new_name], rows))


def _over_world_size(old: Run, new: Run) -> Markup:
    """The curves of two runs of one mode at different WORLD_SIZEs."""
    one_mode = old["run_mode"] == new["run_mode"]
    return curves([old, new]) if one_mode and old["world_size"] != new["world_size"] else Markup()


def _losses(both: tuple[Judged, Judged], variants: list[str]) -> Markup:
    """The old run dotted, the new one solid, a variant in its colour."""
    found = {f"{variant} · {name}": curve for name, _, records in both for variant, curve in losses(records).items()}
    if not found:
        return Markup()
    hues = charts.colours(variants)
    hues = {label: hues.get(label.split(" · ")[0], charts.GREY) for label in found}
    dotted = [label for label in found if label.endswith(f" · {both[0][0]}")]
    figure = charts.lines(found, "step", "loss", hues, points=charts.MOST_POINTS // len(found), dashed=dotted)
    return section(
        "Losses",
        charts.drawn(figure, "losses of both runs by step", 380),
        note=f"Dotted: {both[0][0]}; solid: {both[1][0]}.",
    )


def _bars(title: str, note: str, variants: list[str], both: tuple[Judged, Judged], kind: str, scale: float) -> Markup:
    """One number a variant and run: the chart, and the table with the ratio."""
    found = [{variant["name"]: slowest(variant[kind]) for variant in run["variants"]} for _, run, _ in both]
    names = [name for name in variants if found[0].get(name) or found[1].get(name)]
    if not names:
        return Markup()
    write = milliseconds if kind == "step_seconds" else human_bytes
    rows = []
    for name in names:
        old, new = found[0].get(name), found[1].get(name)
        rows.append([name, write(old), write(new), f"{new / old:.2f}" if old and new else ""])
    values = {
        run_name: [None if (value := row.get(name)) is None else scale * value for name in names]
        for (run_name, _, _), row in zip(both, found, strict=True)
    }
    figure = charts.drawn(charts.pairs(names, values), f"{title} of both runs", 110 + 52 * len(names))
    columns = ["variant", both[0][0], both[1][0], "ratio"]
    return section(title, figure, table(columns, rows, numbers=(1, 2, 3)), note=note)


def _checks(both: tuple[Judged, Judged]) -> Markup:
    """Every check and comparison of either run."""
    claims = [
        {(claim["variant"], claim["name"]): claim for claim in run["checks"] + run["comparisons"]} for _, run, _ in both
    ]
    rows = [
        [variant or "all", name, *_seen(claims[0].get((variant, name))), *_seen(claims[1].get((variant, name)))]
        for variant, name in dict.fromkeys([*claims[0], *claims[1]])
    ]
    columns = ["variant", "check", both[0][0], "", both[1][0], ""]
    return section("Checks", table(columns, rows, numbers=(2, 4)))


def _seen(claim: dict[str, Any] | None) -> Iterator[Any]:
    if claim is None:
        yield from ("", "")
    elif "max_abs_diff" in claim:
        yield from (difference(claim["max_abs_diff"]), verdict_chip(claim))
    else:
        value = human_bytes(claim["measured"]) if claim["unit"] == "B" else f"{claim['measured']:.4g} {claim['unit']}"
        yield from (value, verdict_chip(claim))
