"""The charts of the pages: SVG drawn by pygal, without background, in colours that work on light and dark.

pygal draws the shapes and gives each part a class; the page defines their look once (templates/charts.css), so that
charts follow the reader's light or dark mode without scripts. A chart has 2 to 8 kB: long curves are thinned to a share
of `MOST_POINTS`, and numbers rounded to a tenth of a pixel.
"""

import math
import re
from collections.abc import Iterable, Sequence
from functools import partial
from statistics import quantiles
from typing import Any, NamedTuple

import pygal
from markupsafe import Markup

from distlab.lab.report.units import round_step

# Each has a contrast of at least 3:1 to white and to the dark card (#151b24), as WCAG 1.4.11 requires for graphics.
PALETTE = ("#3b82f6", "#e0691b", "#12966a", "#a667e6", "#d9488b", "#8a8216", "#0e93a8", "#c0504d")
GREY = "#7d8897"
PREDICTED, CALLED, WIRE = GREY, PALETTE[0], PALETTE[1]
MOST_POINTS = 3000  # of all curves of a page, about 40 kB
WIDTH = 480  # in a chart's own coordinates: 12 are a letter, 9 pixels on a phone
MOST_TICKS = 6
LEAST_DOTTED = 24  # longer curves have no dots

Curve = tuple[Sequence[float | None], Sequence[float | None]]


class Pen(NamedTuple):
    """The look of a series."""

    hue: str
    width: float = 2.0
    dashes: str = ""  # lengths of line and gap


class Figure(NamedTuple):
    """A chart, and the pens of its series in order."""

    graph: Any  # pygal's
    pens: list[Pen]
    legend: bool = False


def colours(names: Iterable[str]) -> dict[str, str]:
    """Return a colour for each variant, the same in all charts of a page; one process is grey."""
    variants = [name for name in dict.fromkeys(names) if name != "one process"]
    return {name: PALETTE[index % len(PALETTE)] for index, name in enumerate(variants)} | {"one process": GREY}


def line_chart(
    curves: dict[str, Curve], x_label: str, y_label: str, colour: dict[str, str], *, points: int, layered: bool = False,
    log_x: bool = False, log_y: bool = False,
) -> Figure:  # fmt: skip
    """Draw curves by name, each with at most `points` points; `layered` curves overlap, lower ones wider.

    If there are more names than colours, the second use of a colour is dashed.
    """
    thin = {name: thinned(curve, points) for name, curve in curves.items()}
    across = Axis([value for x, _ in thin.values() for value in x], log_x)
    up = Axis([value for _, y in thin.values() for value in y], log_y)
    graph = pygal.XY(
        x_title=x_label, y_title=y_label, x_value_formatter=across.label, value_formatter=up.label, **PLAIN
    )
    graph.x_labels = across.ticks()
    if log_y:
        graph.y_labels = up.ticks()
    pens: list[Pen] = []
    for index, (name, (x, y)) in enumerate(thin.items()):
        hue = colour.get(name, GREY)
        width = min(2.0 + 1.8 * (len(curves) - 1 - index), 14) if layered else 2.2
        again = hue in [pen.hue for pen in pens]  # more names than colours
        dots = (len(x) <= LEAST_DOTTED and not layered) or len(x) == 1
        graph.add(name, _pairs(across.placed(x), up.placed(y)), show_dots=dots)
        pens.append(Pen(hue, width, "7 5" if again else ""))
    return Figure(graph, pens, legend=len(curves) > 1)


def _pairs(x: Sequence[float | None], y: Sequence[float | None]) -> list[tuple[float, float] | None]:
    """Return the points that can be drawn; a gap where one cannot."""
    return [None if across is None or up is None else (across, up) for across, up in zip(x, y, strict=True)]


def rank_bars(bars: dict[str, list[float | None]], colour: dict[str, str], top: float) -> Figure:
    """Draw bytes by rank, one bar per source; `top` is the largest value of all neighbouring charts."""
    shown = {name: values for name, values in bars.items() if any(value is not None for value in values)}
    graph = pygal.Bar(x_title="rank", range=(0, top or 1), value_formatter=_bytes, **PLAIN)
    graph.x_labels = [str(rank) for rank in range(max(map(len, shown.values()), default=0))]
    for name, values in shown.items():
        graph.add(name, rounded(values))
    return Figure(graph, [Pen(colour[name]) for name in shown])


def spreads(samples: dict[str, list[float]], colour: dict[str, str], x_label: str) -> Figure:
    """Draw one box per name, from the quartiles, with whiskers at the 5th and 95th percentile.

    pygal computes the quartiles again: three copies of each leave them unchanged.
    """
    most = 0.0
    graph = pygal.Box(y_title=x_label, box_mode="extremes", value_formatter=si, **PLAIN)
    for name, values in samples.items():
        cuts = quantiles(values, n=20, method="inclusive") if len(values) > 1 else [values[0]] * 19
        graph.add(name, rounded(cuts[index] for index in (0, 4, 4, 4, 9, 14, 14, 14, 18)))
        most = max(most, cuts[18])
    graph.range = (0, 1.05 * most or 1)
    graph.x_labels = list(samples)
    graph.x_label_rotation = 0 if len(samples) <= 4 else 25
    return Figure(graph, [Pen(colour.get(name, GREY)) for name in samples])


def layers(rows: dict[str, dict[str, int]], colour: dict[str, str]) -> Figure:
    """Draw one bar of bytes per row, stacked by class."""
    kinds = [kind for kind in colour if any(row.get(kind) for row in rows.values())]
    graph = pygal.HorizontalStackedBar(value_formatter=_bytes, **PLAIN)
    graph.x_labels = list(reversed(rows))  # pygal begins at the bottom
    for kind in kinds:
        graph.add(kind, [row.get(kind, 0) for row in reversed(rows.values())])
    return Figure(graph, [Pen(colour[kind]) for kind in kinds])


def stacked(
    amounts: dict[str, list[float]], duration_ms: float, colour: dict[str, str], unit: str, top: float
) -> Figure:
    """Draw amounts over time by class, stacked; each value is for an equal part of the time."""
    parts = max(map(len, amounts.values()), default=1)
    graph = pygal.StackedLine(
        x_title="ms", y_title=unit, fill=True, show_dots=False, range=(0, top or 1), value_formatter=si,
        show_minor_x_labels=False, **PLAIN,
    )  # fmt: skip
    every = max(1, parts // 4)
    graph.x_labels = [si(duration_ms * part / parts) for part in range(parts)]
    graph.x_labels_major = [graph.x_labels[part] for part in range(0, parts, every)]
    for kind, values in amounts.items():
        graph.add(kind, [float(f"{value:.4g}") for value in values])
    return Figure(graph, [Pen(colour[kind]) for kind in amounts])


# --- styles ---

# No script, style or background of pygal's: the page has its own.
PLAIN: dict[str, Any] = {
    "js": [], "css": [], "width": WIDTH, "no_prefix": True, "disable_xml_declaration": True, "show_legend": False,
    "margin": 6, "max_scale": MOST_TICKS, "min_scale": 2, "no_data_text": "no data", "strict": False,
}  # fmt: skip

PLACES = {"d", "x", "y", "width", "height", "cx", "cy", "r", "transform"}  # attributes that hold coordinates
DECIMALS = re.compile(r"-?\d+\.\d\d+(e-\d+)?")


class Drawing(NamedTuple):
    """A chart on a page (templates/parts.html) or in a file (export.py)."""

    title: str  # for screen readers
    svg: Markup
    legend: list[tuple[str, Pen]]  # of its series, if there are several
    height: int  # in its own coordinates, of which it is WIDTH wide


def render_chart(figure: Figure, title: str, height: int) -> Drawing:
    """Return pygal's drawing without the parts for its own script and style; with a legend of its series, if any."""
    figure.graph.config.height = height
    names = [str(options["title"]) for _, options in figure.graph.raw_series]
    figure.graph.add_xml_filter(partial(_lean, pens=figure.pens, names=names))
    legend = list(zip(names, figure.pens, strict=True)) if figure.legend else []
    return Drawing(title, Markup(figure.graph.render(is_unicode=True)), legend, height)


def _lean(root: Any, pens: Sequence[Pen], names: Sequence[str]) -> Any:
    for parent in list(root.iter()):
        for child in list(parent):
            kind = (child.get("class") or "") if isinstance(child.tag, str) else "comment"
            unused = kind == "comment" or child.tag in ("defs", "title") or "overlay" in kind or "background" in kind
            if unused or (child.tag == "desc" and kind != "value"):
                parent.remove(child)
            elif child.tag == "desc":
                child.tag = "title"  # shown by browsers under the pointer
                child.attrib.clear()  # pygal uses lxml if installed, whose elements keep their dict
    for part in root.iter():
        for name, value in part.attrib.items():
            if name in PLACES:
                part.set(name, DECIMALS.sub(lambda number: f"{float(number[0]):.1f}".removesuffix(".0"), value))
        number = re.match(r"series serie-(\d+)", part.get("class") or "")
        if number:
            pen = pens[int(number[1])]
            dashes = f";stroke-dasharray:{pen.dashes}" if pen.dashes else ""
            part.set("class", "series")
            part.set("data-n", names[int(number[1])])
            part.set("style", f"--hue:{pen.hue};stroke-width:{pen.width:g}{dashes}")
    root.attrib.pop("id", None)
    return root


# --- numbers ---


def si(value: float) -> str:
    """Return three digits and a prefix: 12000 as "12k"."""
    size = abs(value)
    for limit, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size >= 0.9995 * limit:
            return f"{value / limit:.3g}{suffix}"
    return f"{value:.3g}"


def _bytes(value: float) -> str:
    return f"{si(value)}B"


class Axis:
    """The scale and labels of an axis; a logarithmic one plots logarithms, and omits values without one."""

    def __init__(self, values: Iterable[float | None], log: bool) -> None:
        self.log = log
        self.values = [value for value in self.placed(list(values)) if value is not None]

    def placed(self, values: Sequence[float | None]) -> list[float | None]:
        """Return the coordinates for pygal."""
        known = [value if value is not None and math.isfinite(value) else None for value in values]
        if not self.log:
            return known
        return [math.log10(value) if value is not None and value > 0 else None for value in known]

    def label(self, value: float) -> str:
        """Return the label of a value."""
        return si(10**value if self.log else value)

    def ticks(self) -> list[float]:
        """Return about MOST_TICKS round numbers at most, from first to last; powers of ten on a logarithmic axis."""
        if not self.values:
            return []
        least, most = min(self.values), max(self.values)
        step = round_step((most - least) or 1.0, MOST_TICKS)
        if self.log:
            step, least, most = max(1, round(step)), math.floor(least), math.ceil(most)
        first, last = math.ceil(least / step - 1e-9), math.floor(most / step + 1e-9)
        return [number * step for number in range(first, last + 1)]


def thinned(curve: Curve, points: int) -> tuple[list[float | None], list[float | None]]:
    """Return at most `points` points of a curve, evenly spaced, with its first and last."""
    x, y = curve
    kept = min(len(x), max(2, points))
    picked = [round(index * (len(x) - 1) / max(1, kept - 1)) for index in range(kept)]
    return rounded(x[index] for index in picked), rounded(y[index] for index in picked)


def rounded(values: Iterable[float | None]) -> list[float | None]:
    """Return six digits of each number, more than a screen shows."""
    return [None if value is None else float(f"{value:.6g}") for value in values]
