"""The charts of the pages: SVG by pygal, with no ground of its own and colours that can be read on light and dark.

pygal draws what a chart is made of and names each part by a class; how these look stands once in the page
(templates/charts.css), so that a chart follows the reader's light or dark, and nothing of a script is in it. A chart is
2 to 8 kB; long curves are cut to a share of `MOST_POINTS`, and numbers to a tenth of a pixel, before they reach the page.
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

# Each has a contrast of 3:1 and more to white and to the dark card (#151b24), as WCAG 1.4.11 asks of graphics.
PALETTE = ("#3b82f6", "#e0691b", "#12966a", "#a667e6", "#d9488b", "#8a8216", "#0e93a8", "#c0504d")
GREY = "#7d8897"
PREDICTED, CALLED, WIRE = GREY, PALETTE[0], PALETTE[1]
MOST_POINTS = 3000  # of all curves of a page together, about 40 kB
WIDTH = 480  # of a chart's own coordinates: 12 of them are a letter, 9 pixels of a phone
MOST_TICKS = 6
LEAST_DOTTED = 24  # points: a longer curve is a line alone

Curve = tuple[Sequence[float | None], Sequence[float | None]]


class Pen(NamedTuple):
    """How a series is drawn."""

    hue: str
    width: float = 2.0
    dashes: str = ""  # lengths of line and gap


class Figure(NamedTuple):
    """A chart, and the pens of its series in their order."""

    graph: Any  # pygal's
    pens: list[Pen]
    legend: bool = False


def colours(names: Iterable[str]) -> dict[str, str]:
    """A colour for each variant, the same in all charts of a page; one process is grey."""
    variants = [name for name in dict.fromkeys(names) if name != "one process"]
    return {name: PALETTE[index % len(PALETTE)] for index, name in enumerate(variants)} | {"one process": GREY}


def line_chart(
    curves: dict[str, Curve], x_label: str, y_label: str, colour: dict[str, str], *, points: int, layered: bool = False,
    log_x: bool = False, log_y: bool = False,
) -> Figure:  # fmt: skip
    """Curves by name, each of at most `points` points; `layered` curves lie on top of each other, lower ones wider.

    Where there are more names than colours, the second of a colour is drawn in dashes.
    """
    thin = {name: thinned(curve, points) for name, curve in curves.items()}
    across = Axis([value for x, _ in thin.values() for value in x], log_x)
    up = Axis([value for _, y in thin.values() for value in y], log_y)
    graph = pygal.XY(x_title=x_label, y_title=y_label, x_value_formatter=across.told, value_formatter=up.told, **PLAIN)
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
    """The points that can be drawn; a gap where one cannot."""
    return [None if across is None or up is None else (across, up) for across, up in zip(x, y, strict=True)]


def rank_bars(bars: dict[str, list[float | None]], colour: dict[str, str], top: float) -> Figure:
    """Bytes by rank, a bar a source; `top` is the largest value of all charts that stand beside this one."""
    shown = {name: values for name, values in bars.items() if any(value is not None for value in values)}
    graph = pygal.Bar(x_title="rank", range=(0, top or 1), value_formatter=_bytes, **PLAIN)
    graph.x_labels = [str(rank) for rank in range(max(map(len, shown.values()), default=0))]
    for name, values in shown.items():
        graph.add(name, rounded(values))
    return Figure(graph, [Pen(colour[name]) for name in shown])


def spreads(samples: dict[str, list[float]], colour: dict[str, str], x_label: str) -> Figure:
    """A box a name, from the quartiles, with whiskers at the 5th and 95th percentile.

    pygal takes quartiles of what it is given: three of each leave it no choice.
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
    """A bar of bytes a row, stacked by class."""
    kinds = [kind for kind in colour if any(row.get(kind) for row in rows.values())]
    graph = pygal.HorizontalStackedBar(value_formatter=_bytes, **PLAIN)
    graph.x_labels = list(reversed(rows))  # pygal begins at the bottom
    for kind in kinds:
        graph.add(kind, [row.get(kind, 0) for row in reversed(rows.values())])
    return Figure(graph, [Pen(colour[kind]) for kind in kinds])


def stacked(held: dict[str, list[float]], duration_ms: float, colour: dict[str, str], unit: str, top: float) -> Figure:
    """Amounts over time by class, one upon the other; each value stands for an equal part of the time."""
    parts = max(map(len, held.values()), default=1)
    graph = pygal.StackedLine(
        x_title="ms", y_title=unit, fill=True, show_dots=False, range=(0, top or 1), value_formatter=si,
        show_minor_x_labels=False, **PLAIN,
    )  # fmt: skip
    every = max(1, parts // 4)
    graph.x_labels = [si(duration_ms * part / parts) for part in range(parts)]
    graph.x_labels_major = [graph.x_labels[part] for part in range(0, parts, every)]
    for kind, values in held.items():
        graph.add(kind, [float(f"{value:.4g}") for value in values])
    return Figure(graph, [Pen(colour[kind]) for kind in held])


# --- how they look ---

# No script, no style and no ground of pygal's: the page has its own.
PLAIN: dict[str, Any] = {
    "js": [], "css": [], "width": WIDTH, "no_prefix": True, "disable_xml_declaration": True, "show_legend": False,
    "margin": 6, "max_scale": MOST_TICKS, "min_scale": 2, "no_data_text": "no data", "strict": False,
}  # fmt: skip

PLACES = {"d", "x", "y", "width", "height", "cx", "cy", "r", "transform"}  # attributes that hold coordinates
DECIMALS = re.compile(r"-?\d+\.\d\d+(e-\d+)?")


class Drawing(NamedTuple):
    """A chart as it stands on a page (templates/parts.html) and in a file (export.py)."""

    title: str  # names it to a screen reader
    svg: Markup
    legend: list[tuple[str, Pen]]  # of its series, where there are several
    height: int  # in its own coordinates, of which it is WIDTH wide


def render_chart(figure: Figure, title: str, height: int) -> Drawing:
    """What pygal draws, without what only its own script and style would use; its series in a legend, where it has
    one."""
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
                child.tag = "title"  # what a browser tells where the pointer is
                child.attrib.clear()  # where lxml is installed pygal takes it, whose elements keep their dict
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
    """Three digits and a prefix: 12000 as "12k"."""
    size = abs(value)
    for limit, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size >= 0.9995 * limit:
            return f"{value / limit:.3g}{suffix}"
    return f"{value:.3g}"


def _bytes(value: float) -> str:
    return f"{si(value)}B"


class Axis:
    """Where values stand, and its labels; a logarithmic one has the logarithms, and those of no number are left out."""

    def __init__(self, values: Iterable[float | None], log: bool) -> None:
        self.log = log
        self.values = [value for value in self.placed(list(values)) if value is not None]

    def placed(self, values: Sequence[float | None]) -> list[float | None]:
        """As pygal is to draw them."""
        known = [value if value is not None and math.isfinite(value) else None for value in values]
        if not self.log:
            return known
        return [math.log10(value) if value is not None and value > 0 else None for value in known]

    def told(self, value: float) -> str:
        """A label, or what a point is."""
        return si(10**value if self.log else value)

    def ticks(self) -> list[float]:
        """At most about MOST_TICKS round numbers from the first to the last; of a logarithmic axis powers of ten."""
        if not self.values:
            return []
        least, most = min(self.values), max(self.values)
        step = round_step((most - least) or 1.0, MOST_TICKS)
        if self.log:
            step, least, most = max(1, round(step)), math.floor(least), math.ceil(most)
        first, last = math.ceil(least / step - 1e-9), math.floor(most / step + 1e-9)
        return [number * step for number in range(first, last + 1)]


def thinned(curve: Curve, points: int) -> tuple[list[float | None], list[float | None]]:
    """At most `points` points of a curve, evenly spaced, its first and its last among them."""
    x, y = curve
    kept = min(len(x), max(2, points))
    picked = [round(index * (len(x) - 1) / max(1, kept - 1)) for index in range(kept)]
    return rounded(x[index] for index in picked), rounded(y[index] for index in picked)


def rounded(values: Iterable[float | None]) -> list[float | None]:
    """Six digits are more than a screen shows."""
    return [None if value is None else float(f"{value:.6g}") for value in values]
