"""The charts of the pages: Plotly figures with no ground of their own and colours that can be read on light and dark.

A page must stay under 5 MB and Plotly's bundle takes 4.8 of them, so numbers are cut to six digits, long curves
to a share of `MOST_POINTS`, and spreads to their quantiles, before they reach the page.
"""

import hashlib
import html
import json
from collections.abc import Iterable, Sequence
from statistics import quantiles
from typing import Any

import plotly.graph_objects as go

from workers.report.markup import Markup, text

# Each has a contrast of 3:1 and more to white and to the dark card (#151b24), as WCAG 1.4.11 asks of graphics.
PALETTE = ("#3b82f6", "#e0691b", "#12966a", "#a667e6", "#d9488b", "#8a8216", "#0e93a8", "#c0504d")
GREY = "#7d8897"
PREDICTED, CALLED, WIRE = GREY, PALETTE[0], PALETTE[1]
MOST_POINTS = 3000  # of all curves of a page together, about 50 kB

Curve = tuple[Sequence[float], Sequence[float]]


def colours(names: Iterable[str]) -> dict[str, str]:
    """A colour for each variant, the same in all charts of a page; one process is grey."""
    variants = [name for name in dict.fromkeys(names) if name != "one process"]
    return {name: PALETTE[index % len(PALETTE)] for index, name in enumerate(variants)} | {"one process": GREY}


def lines(
    curves: dict[str, Curve], x_label: str, y_label: str, colour: dict[str, str], *, points: int, layered: bool = False,
    dashed: Iterable[str] = (), log_x: bool = False, log_y: bool = False,
) -> go.Figure:  # fmt: skip
    """Curves by name, each of at most `points` points; `layered` curves lie on top of each other, lower ones wider.

    Where there are more names than colours, the second of a colour is drawn in dashes.
    """
    traces: list[go.Scatter] = []
    for index, (name, curve) in enumerate(curves.items()):
        x, y = thinned(curve, points)
        width = 2.0 + 1.8 * (len(curves) - 1 - index) if layered else 2.2
        again = colour.get(name, GREY) in (trace.line.color for trace in traces)  # more names than colours
        dash = "dot" if name in dashed else "dash" if again else "solid"
        pen = {"color": colour.get(name, GREY), "width": min(width, 14), "dash": dash}
        mode = "lines+markers" if len(x) <= 24 and not layered else "lines" if len(x) > 1 else "markers"
        traces.append(go.Scatter(x=x, y=y, name=plain(name), mode=mode, line=pen, showlegend=name not in dashed))
    figure = framed(traces, x_label, y_label)
    figure.update_layout(hovermode="x", showlegend=len(curves) > 1)
    figure.update_xaxes(_scale(log_x, [value for x, _ in curves.values() for value in x]))
    figure.update_yaxes(_scale(log_y, [value for _, y in curves.values() for value in y]))
    return figure


def _scale(log: bool, values: Sequence[float]) -> dict[str, Any]:
    """An axis; a logarithmic one over two decades and more is labelled at the powers of ten alone."""
    positive = [value for value in values if value > 0]
    wide = log and bool(positive) and max(positive) / min(positive) >= 100
    return {"type": "log" if log else "linear", "exponentformat": "SI"} | ({"dtick": 1} if wide else {})


def rank_bars(bars: dict[str, list[float | None]], colour: dict[str, str], top: float) -> go.Figure:
    """Bytes by rank, a bar a source; `top` is the largest value of all charts that stand beside this one."""
    traces = [
        go.Bar(
            x=[f"{rank}" for rank in range(len(values))], y=rounded(values), name=name, marker={"color": colour[name]}
        )
        for name, values in bars.items()
        if any(value is not None for value in values)
    ]
    figure = framed(traces, "rank", "")
    figure.update_layout(barmode="group", bargap=0.25, showlegend=False)
    figure.update_xaxes(type="category")
    figure.update_yaxes(tickformat="~s", ticksuffix="B", range=[0, 1.05 * top or 1], hoverformat=".4s")
    return figure


def spreads(samples: dict[str, list[float]], colour: dict[str, str], x_label: str) -> go.Figure:
    """A box a name, from the quartiles, with whiskers at the 5th and 95th percentile."""
    traces = []
    for name, values in samples.items():
        cuts = rounded(quantiles(values, n=20, method="inclusive") if len(values) > 1 else [values[0]] * 19)
        box = {
            "q1": [cuts[4]],
            "median": [cuts[9]],
            "q3": [cuts[14]],
            "lowerfence": [cuts[0]],
            "upperfence": [cuts[18]],
        }
        pen = {"color": colour.get(name, GREY), "width": 2}
        traces.append(go.Box(y=[plain(name)], name=plain(name), orientation="h", line=pen, **box))
    figure = framed(traces, x_label, "")
    figure.update_layout(showlegend=False, boxgap=0.4)
    figure.update_xaxes(rangemode="tozero")
    figure.update_yaxes(autorange="reversed", type="category")
    return figure


def layers(rows: dict[str, dict[str, int]], colour: dict[str, str]) -> go.Figure:
    """A bar of bytes a row, stacked by class."""
    traces = [
        go.Bar(
            x=rounded(row.get(kind, 0) for row in rows.values()), y=[plain(name) for name in rows], orientation="h",
            name=kind, marker={"color": hue},
        )
        for kind, hue in colour.items()
        if any(row.get(kind) for row in rows.values())
    ]  # fmt: skip
    figure = framed(traces, "", "")
    figure.update_layout(barmode="stack", bargap=0.3, showlegend=False)
    figure.update_xaxes(tickformat="~s", ticksuffix="B", rangemode="tozero", hoverformat=".4s")
    figure.update_yaxes(autorange="reversed", type="category")
    return figure


def stacked(
    held: dict[str, list[float]], duration_ms: float, colour: dict[str, str], unit: str, top: float
) -> go.Figure:
    """Amounts over time by class, one upon the other; each value stands for an equal part of the time."""
    traces = [
        go.Scatter(
            x0=0, dx=float(f"{duration_ms / len(values):.4g}"), y=[float(f"{value:.4g}") for value in values], name=kind,
            mode="lines", line={"width": 0, "shape": "hv"}, fillcolor=colour[kind], stackgroup="held",
        )
        for kind, values in held.items()
    ]  # fmt: skip
    figure = framed(traces, "ms", unit)
    figure.update_layout(hovermode="x", showlegend=False)
    figure.update_xaxes(hoverformat=".3~f", ticksuffix="")
    figure.update_yaxes(range=[0, 1.05 * top or 1])
    return figure


def pairs(names: list[str], values: dict[str, list[float | None]]) -> go.Figure:
    """Bars of several runs side by side, a group a name."""
    traces = [
        go.Bar(
            y=[plain(name) for name in names],
            x=rounded(row),
            orientation="h",
            name=plain(run),
            marker={"color": PALETTE[index]},
        )
        for index, (run, row) in enumerate(values.items())
    ]
    figure = framed(traces, "", "")
    figure.update_layout(barmode="group", bargap=0.3)
    figure.update_yaxes(autorange="reversed", type="category")
    return figure


def framed(traces: Iterable[Any], x_label: str, y_label: str) -> go.Figure:
    """A figure with the lab's axes; how it looks otherwise stands once in the page, as a template (`look`)."""
    figure = go.Figure(list(traces), layout={"template": "none"})
    figure.update_xaxes(title={"text": plain(x_label)})
    figure.update_yaxes(title={"text": plain(y_label)})
    return figure


# Plotly's empty template, which is in each figure, and the name under which the page has the lab's: 0.8 kB for each of
# up to 50 charts.
EMPTY, LOOK = '"template":{"data":{"scatter":[{"type":"scatter"}]}}', "RANKLAB_LOOK"


CLOUD = "window.PLOTLYENV=window.PLOTLYENV || {}; "  # for pages that Plotly's own servers show


def look() -> Markup:
    """The script that names the template of all charts, for the page's head."""
    clear = "rgba(0,0,0,0)"
    axis = {
        "automargin": True, "zeroline": False, "showgrid": True, "gridcolor": GREY, "fixedrange": True,
        "title": {"standoff": 8},
    }  # fmt: skip
    layout = {
        "paper_bgcolor": clear, "plot_bgcolor": clear, "margin": {"l": 4, "r": 12, "t": 6, "b": 4}, "dragmode": False,
        "font": {"family": "system-ui, sans-serif", "size": 12.5, "color": GREY}, "hoverlabel": {"namelength": -1},
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "bgcolor": clear, "itemclick": "toggle"},
        "xaxis": axis, "yaxis": axis,
    }  # fmt: skip
    return Markup(f"<script>const {LOOK} = {json.dumps({'layout': layout})};</script>")


def drawn(figure: go.Figure, title: str, height: int) -> Markup:
    """The figure as HTML: as wide as the page, `height` pixels high; `title` names it to a screen reader."""
    name = hashlib.sha256((title + figure.to_json()).encode()).hexdigest()[:12]
    config = {"responsive": True, "displayModeBar": False}
    inner = figure.to_html(
        full_html=False, include_plotlyjs=False, config=config, div_id=f"c{name}", default_height=f"{height}px"
    )  # fmt: skip
    squeezed = " ".join(inner.split()).replace(EMPTY, f'"template":{LOOK}').replace(CLOUD, "")
    return Markup(
        f'<div class="chart" role="img" aria-label="{text(title)}" style="height:{height}px">{squeezed}</div>'
    )


def plain(name: str) -> str:
    """A name for Plotly, which reads its labels as HTML."""
    return html.escape(name, quote=False)


def thinned(curve: Curve, points: int) -> tuple[list[float | None], list[float | None]]:
    """At most `points` points of a curve, evenly spaced, its first and its last among them."""
    x, y = curve
    kept = min(len(x), max(2, points))
    picked = [round(index * (len(x) - 1) / max(1, kept - 1)) for index in range(kept)]
    return rounded(x[index] for index in picked), rounded(y[index] for index in picked)


def rounded(values: Iterable[float | None]) -> list[float | None]:
    """Six digits are more than a screen shows."""
    return [None if value is None else float(f"{value:.6g}") for value in values]
