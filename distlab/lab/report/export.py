"""A run as files for other programs: each figure of its report as SVG (`./run report RUN --figures DIR`); its checks as
JUnit XML, for any CI (`--junit FILE`).

Figures are those of the page on a white background, with the light page's colours filled in, since a file has no
external style sheet.
"""

import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from typing import Any

from markupsafe import Markup

from distlab.lab.config import Refusal
from distlab.lab.report import charts
from distlab.lab.report.charts import Drawing
from distlab.lab.report.html import asset, render
from distlab.lab.report.page import contents
from distlab.lab.report.reading import write_atomically
from distlab.lab.report.records import Ranks, Run
from distlab.lab.report.sentences import claim_name, failure_sentence, lost_sentence
from distlab.lab.report.timeline_panels import HUES, Rows, timeline
from distlab.lab.report.units import allowed, difference, quantity
from distlab.lab.report.verdict import first

LEGEND = 24  # pixels above a chart for its legend
SERIES = re.compile(r'data-n="([^"]*)" style="--hue:(#\w+);')


def write_figures(folder: Path, run: Run, records: Ranks) -> list[Path]:
    """Write all figures of a run into `folder`, each as NAME.svg; return them.

    Raises Untimed if there is nothing to draw, OSError if a file cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    found = dict(figures(run, records))
    if not found:
        raise Untimed(f"the run {run['run_id']} has no figure: it recorded no step and drew no chart")
    for name, drawing in found.items():
        write_atomically(folder / f"{name}.svg", [drawing])
    return [folder / f"{name}.svg" for name in found]


def figures(run: Run, records: Ranks) -> Iterator[tuple[str, str]]:
    """Yield (name, SVG): the timeline if steps were recorded, and every chart of the page."""
    with suppress(Untimed):
        yield "picture", picture(run, records)
    used: dict[str, int] = {}
    for drawing in drawings(contents(run, records)):
        name = re.sub(r"[^a-z0-9]+", "-", drawing.title.lower()).strip("-")
        used[name] = used.get(name, 0) + 1
        yield name if used[name] == 1 else f"{name}-{used[name]}", chart_alone(drawing)


def drawings(part: Any) -> Iterator[Drawing]:
    """Yield the charts in a page's contents, in order."""
    if isinstance(part, Drawing):
        yield part
    elif isinstance(part, dict | list | tuple):
        for each in part.values() if isinstance(part, dict) else part:
            yield from drawings(each)


def chart_alone(drawing: Drawing) -> str:
    """Return a chart of the page as a file, its legend above it."""
    series = {Markup(name).unescape(): hue for name, hue in SERIES.findall(drawing.svg)}
    places = accumulate((22 + 7 * len(name) + 16 for name in series), initial=8)
    marks = re.sub(r'style="--hue:(#\w+);([^"]*)"', r'style="\2" data-hue="\1"', str(drawing.svg))
    return render(
        "figure.svg", title=drawing.title, width=charts.WIDTH, height=drawing.height, marks=Markup(marks),
        style=style_of(marks),
        legend=[*zip(places, series.items(), strict=False)] if len(series) > 1 else [], legend_height=LEGEND,
    )  # fmt: skip


def style_of(marks: str) -> Markup:
    """Return the charts' style with each series' colour instead of its variable."""
    rules = str(resolved(asset("charts.css").replace("var(--hue)", "var(--ink)")))
    for hue in dict.fromkeys(re.findall(r'data-hue="(#\w+)"', marks)):
        series = f'[data-hue="{hue}"]'
        rules += f".chart .series{series} .line, .chart .series{series} .box path {{ stroke: {hue}; }}"
        rules += f".chart .series{series} .rect, .chart .series{series} .dot {{ fill: {hue}; }}"
        rules += f".chart .series{series} .box rect {{ stroke: {hue}; }}"
        rules += f".chart .stackedline-graph .series{series} .line {{ fill: {hue}; stroke: none; }}"
    return Markup(rules)


# The timeline of a run as a separate file, with its own background for light and dark pages: templates/picture.svg. On
# the page it is interactive (templates/timeline.js).

WIDTH, LEFT, RIGHT, TOP, BELOW = 960, 82, 28, 98, 88  # pixels, of the whole and of the margins
LETTER = 6  # pixels of one in the name of a row
HEADING, GAP = 26, 14  # pixels of the line above a variant's rows, and below them
LIGHT = {
    "--card": "#ffffff", "--ink": "#18202b", "--soft": "#566274", "--line": "#dfe4eb", "--hatch": "#c3ccd8",
}  # fmt: skip


class Untimed(Refusal):
    """Nothing of this run can be drawn; the message is the sentence to end with."""


STEP = "The median of three recorded steps of each variant, on rank 0's clock"


def picture(run: Run, records: Ranks, title: str = "", caption: str = STEP) -> str:
    """Return the whole SVG, with a title and a caption; raises Untimed if no rank marked its steps."""
    rows = Rows(21, 7)
    drawn = timeline(run, records, rows)
    if drawn is None:
        raise Untimed("has no timeline: its mode records none, or the run ended before its timed steps")
    left = max(LEFT, 34 + LETTER * max(map(len, drawn.names)))
    width = WIDTH - left - RIGHT
    whole = rows.whole(drawn.num_ranks)
    tops = [TOP + index * (HEADING + whole + GAP) for index in range(len(drawn.panels) + 1)]
    *key_x, _ = accumulate((19 + 7 * len(name) + 18 for _, name in drawn.key), initial=24)
    start = first(records)
    return render(
        "picture.svg",
        title=title
        or f"What {drawn.num_ranks} rank{'s' if drawn.num_ranks > 1 else ''} do in one training step:"
        f" {', '.join(panel.scene.variant for panel in drawn.panels)}",
        style=resolved(asset("marks.css") + asset("picture.css")),
        width=WIDTH, height=tops[-1] + BELOW, left=left, right=WIDTH - RIGHT, top=TOP, bottom=tops[-1],
        panel_width=width, panel_height=whole, heading=HEADING,
        key=[*zip(key_x, drawn.key, strict=True)],
        names=drawn.names, microbatches=HUES[: drawn.microbatches],
        ticks=[(left + width * float(place.rstrip("%")) / 100, name) for place, name in drawn.ticks],
        panels=[*zip(tops, drawn.panels, strict=False)], rows=rows, axis=drawn.axis,
        caption=f"{caption} · {start.title}",
        settings=" ".join(f"{name}={value}" for name, value in start.repeat.items()),
    )  # fmt: skip


def resolved(style: str) -> Markup:
    """Return the style with the light page's colours instead of its variables."""
    return Markup(re.sub(r"var\((--\w+)\)", lambda name: LIGHT[name[1]], str(style)))


# The run as JUnit XML: one test case per check and comparison, one per lost rank.

UNPRINTABLE = re.compile(
    "[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]"
)  # XML 1.0, section 2.2: not allowed in XML


def write_junit(path: Path, run: Run) -> None:
    """Write the run to `path`; raises OSError if it cannot."""
    tree = junit(run)
    ET.indent(tree)
    write_atomically(path, [ET.tostring(tree, encoding="unicode", xml_declaration=False), "\n"])


def junit(run: Run) -> ET.Element:
    """Return <testsuites> with one suite: failed checks are failures, lost ranks errors, informational ones skipped."""
    suite = ET.Element("testsuite", name=_clean(f"{run['run_mode']} {run['run_id']}"))
    for claim in run["checks"] + run["comparisons"]:
        case = _case(suite, run, claim["variant"], claim["name"])
        if not claim["passed"]:
            ET.SubElement(case, "failure", message=_clean(failure_sentence(claim)), type=claim["name"])
        elif not claim.get("decides", True):
            ET.SubElement(case, "skipped", message=_clean(f"informational: {_claim_sentence(claim)}"))
        else:
            ET.SubElement(case, "system-out").text = _clean(_claim_sentence(claim))
    for skip in run["skipped"]:
        ET.SubElement(_case(suite, run, skip["variant"], "variant"), "skipped", message=_clean(skip["reason"]))
    lost = [(lost["rank"], lost_sentence(lost)) for lost in run["lost"]]
    for rank, sentence in lost + [(error["rank"], error["error"]) for error in run["errors"]]:
        ET.SubElement(_case(suite, run, "", f"rank {rank}"), "error", message=_clean(sentence), type=run["verdict"])
    tags = {"tests": "testcase", "failures": ".//failure", "errors": ".//error", "skipped": ".//skipped"}
    for kind, tag in tags.items():
        suite.set(kind, str(len(suite.findall(tag))))
    suites = ET.Element("testsuites")
    suites.append(suite)
    return suites


def _case(suite: ET.Element, run: Run, variant: str, name: str) -> ET.Element:
    place = ".".join(part for part in ("distlab", run["run_mode"], variant) if part)
    return ET.SubElement(suite, "testcase", classname=_clean(place), name=_clean(name))


def _claim_sentence(claim: Run) -> str:
    if "max_abs_diff" in claim:
        return f"{claim_name(claim)} differs by {difference(claim['max_abs_diff'])}, {allowed(claim)} allowed"
    measured, predicted = (quantity(claim[kind], claim["unit"]) for kind in ("measured", "predicted"))
    return f"{claim_name(claim)} predicted {predicted}, measured {measured}"


def _clean(text: str) -> str:
    return UNPRINTABLE.sub("?", text)
