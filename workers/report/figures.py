"""Each figure of a report as a file: SVG, and PNG for what takes no SVG. `./run report RUN --figures DIR` writes them.

A figure is what stands on the page, on a white ground and with the light page's colours put in, since a file has no
style sheet of its own. PNGs are drawn with a font that comes with the lab, so that all machines draw the same.
"""

import html
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from workers.report import charts
from workers.report.claims import Run
from workers.report.lines import write_atomically, write_bytes_atomically
from workers.report.looks import resolved
from workers.report.page import page
from workers.report.picture import Untimed, picture
from workers.report.records import Ranks

PNG_ZOOM = 2  # pixels of a PNG for each of the SVG: sharp on a slide
LEGEND = 24  # pixels above a chart for its legend
GROUND = '<rect width="100%" height="100%" fill="#fff"/>'
# A chart as charts.drawn makes it: its name and its drawing.
CHART = re.compile(
    r'<div class="chart" role="img" aria-label="(?P<name>[^"]*)">(?:<div class="key legend">.*?</div>)?'
    r'<svg[^>]*viewBox="0 0 (?P<width>\d+) (?P<height>\d+)"[^>]*>(?P<marks>.*?)</svg></div>',
    re.DOTALL,
)
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
    for chart in CHART.finditer(page(run, records)):
        name = re.sub(r"[^a-z0-9]+", "-", html.unescape(chart["name"]).lower()).strip("-")
        used[name] = used.get(name, 0) + 1
        yield name if used[name] == 1 else f"{name}-{used[name]}", chart_alone(chart)


def chart_alone(chart: re.Match[str]) -> str:
    """A chart of the page as a file, its legend above it."""
    width, height = int(chart["width"]), int(chart["height"])
    series = dict(SERIES.findall(chart["marks"]))
    legend = "".join(legend_marks(series)) if len(series) > 1 else ""
    top = LEGEND if legend else 0
    marks = re.sub(r'style="--hue:(#\w+);([^"]*)"', r'style="\2" data-hue="\1"', chart["marks"])
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height + top}" width="{width}"'
        f' height="{height + top}" class="chart"><title>{chart["name"]}</title><style>{style_of(marks)}</style>{GROUND}'
        f'{legend}<svg y="{top}" width="{width}" height="{height}">{marks}</svg></svg>\n'
    )


def style_of(marks: str) -> str:
    """The style of the charts with each series' colour in the place of its variable."""
    rules = resolved(charts.LOOK.replace("var(--hue)", "var(--ink)"))
    for hue in dict.fromkeys(re.findall(r'data-hue="(#\w+)"', marks)):
        series = f'[data-hue="{hue}"]'
        rules += f".chart .series{series} .line, .chart .series{series} .box path {{ stroke: {hue}; }}"
        rules += f".chart .series{series} .rect, .chart .series{series} .dot {{ fill: {hue}; }}"
        rules += f".chart .series{series} .box rect {{ stroke: {hue}; }}"
        rules += f".chart .stackedline-graph .series{series} .line {{ fill: {hue}; stroke: none; }}"
    return rules


def legend_marks(series: dict[str, str]) -> Iterator[str]:
    """Names beside their colours, in a row; names are HTML already."""
    x = 8.0
    for name, hue in series.items():
        yield f'<rect x="{x:g}" y="10" width="16" height="4" fill="{hue}"/><text x="{x + 22:g}" y="16">{name}</text>'
        x += 22 + 7 * len(html.unescape(name)) + 16


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
