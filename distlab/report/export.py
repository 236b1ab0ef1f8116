"""Each figure of a report as a file: SVG, and PNG for what takes no SVG. `./run report RUN --figures DIR` writes them.

A figure is what stands on the page, on a white ground and with the light page's colours put in, since a file has no
style sheet of its own. PNGs are drawn with a font that comes with the lab, so that all machines draw the same.
"""

import re
from collections.abc import Iterator
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from typing import Any

from markupsafe import Markup

from distlab.report.charts import WIDTH, Drawing
from distlab.report.claims import Run
from distlab.report.html import asset, render
from distlab.report.page import contents
from distlab.report.picture import Untimed, picture, resolved
from distlab.report.reading import write_atomically, write_bytes_atomically
from distlab.report.records import Ranks

PNG_ZOOM = 2  # pixels of a PNG for each of the SVG: sharp on a slide
LEGEND = 24  # pixels above a chart for its legend
SERIES = re.compile(r'data-n="([^"]*)" style="--hue:(#\w+);')


def write_figures(folder: Path, run: Run, records: Ranks) -> list[Path]:
    """Write all figures of a run into `folder`, each as NAME.svg and NAME.png; returns the SVGs.

    Raises Untimed where there is nothing to draw, OSError where it cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    found = dict(figures(run, records))
    if not found:
        raise Untimed("has no figure: it ended before anything was measured")
    for name, drawing in found.items():
        write_atomically(folder / f"{name}.svg", [drawing])
        write_bytes_atomically(folder / f"{name}.png", png(drawing))
    return [folder / f"{name}.svg" for name in found]


def figures(run: Run, records: Ranks) -> Iterator[tuple[str, str]]:
    """(name, SVG) of each: the picture where steps were recorded, and every chart of the page."""
    with suppress(Untimed):
        yield "picture", picture(run, records)
    used: dict[str, int] = {}
    for drawing in drawings(contents(run, records)):
        name = re.sub(r"[^a-z0-9]+", "-", drawing.title.lower()).strip("-")
        used[name] = used.get(name, 0) + 1
        yield name if used[name] == 1 else f"{name}-{used[name]}", chart_alone(drawing)


def drawings(part: Any) -> Iterator[Drawing]:
    """The charts in what a page shows, in its order."""
    if isinstance(part, Drawing):
        yield part
    elif isinstance(part, dict | list | tuple):
        for each in part.values() if isinstance(part, dict) else part:
            yield from drawings(each)


def chart_alone(drawing: Drawing) -> str:
    """A chart of the page as a file, its legend above it."""
    series = {Markup(name).unescape(): hue for name, hue in SERIES.findall(drawing.svg)}
    places = accumulate((22 + 7 * len(name) + 16 for name in series), initial=8)
    marks = re.sub(r'style="--hue:(#\w+);([^"]*)"', r'style="\2" data-hue="\1"', str(drawing.svg))
    return render(
        "figure.svg", title=drawing.title, width=WIDTH, height=drawing.height, marks=Markup(marks),
        style=style_of(marks),
        legend=[*zip(places, series.items(), strict=False)] if len(series) > 1 else [], legend_height=LEGEND,
    )  # fmt: skip


def style_of(marks: str) -> Markup:
    """The style of the charts with each series' colour in the place of its variable."""
    rules = str(resolved(asset("charts.css").replace("var(--hue)", "var(--ink)")))
    for hue in dict.fromkeys(re.findall(r'data-hue="(#\w+)"', marks)):
        series = f'[data-hue="{hue}"]'
        rules += f".chart .series{series} .line, .chart .series{series} .box path {{ stroke: {hue}; }}"
        rules += f".chart .series{series} .rect, .chart .series{series} .dot {{ fill: {hue}; }}"
        rules += f".chart .series{series} .box rect {{ stroke: {hue}; }}"
        rules += f".chart .stackedline-graph .series{series} .line {{ fill: {hue}; stroke: none; }}"
    return Markup(rules)


def png(drawing: str) -> bytes:
    """The SVG as pixels."""
    import resvg_py
    import ttf_opensans

    fonts = str(Path(ttf_opensans.__file__).parent / "ttf")
    return bytes(
        resvg_py.svg_to_bytes(
            svg_string=drawing, zoom=PNG_ZOOM, skip_system_fonts=True, font_dirs=[fonts], font_family="Open Sans",
            sans_serif_family="Open Sans",
        )
    )  # fmt: skip
