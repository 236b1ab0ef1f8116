"""A run as a picture of a few kilobytes: a step of its variants, rank by rank, or else its losses, or else its mode.

A rank's step is a row of columns, each in the colour of the innermost span that holds its middle. All variants share
one axis of time, so that a shorter step is a shorter row. Columns halve until the picture is small enough.
"""

import math
from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

from workers.report import charts
from workers.report.markup import Markup, text
from workers.report.page import curves
from workers.report.records import Ranks
from workers.report.spans import KINDS, Span, step_seconds, timelines

MOST_BYTES = 5000  # of one picture: 500 of them are 2.5 MB
COLUMNS = 240
MOST_ROWS, MOST_RANKS = 24, 8  # as many as can be told apart at this height
ROW, PITCH, BETWEEN = 5, 6, 4  # the height of a rank's row, from it to the next, and between two variants
ORDER = list(KINDS)  # outer kinds first: the others lie over them
WIDTH, HEIGHT = 240, 96  # of a picture of losses
MOST_CURVES, MOST_POINTS = 8, 480  # and of all of its curves together

OfRanks = Sequence[Sequence[Span]]


class Thumbnail(NamedTuple):
    """The picture, and what it shows, in words."""

    drawing: Markup
    told: str


def thumbnail(records: Ranks, world_size: int, mode: str) -> Thumbnail:
    """The picture of a run, of its Timeline or Losses records; others are not looked at.

    Raises ValueError, TypeError or IndexError where their numbers are none of a run of this size.
    """
    if steps := timelines(records, world_size):
        return of_steps(steps, world_size)
    losses = {name: finite(curve) for name, curve in curves(records).items()}
    if found := {name: points for name, points in losses.items() if len(points) > 1}:
        return of_losses(found)
    return Thumbnail(Markup(f"<span>{text(mode or '?')}</span>"), "no timeline and no losses")


def of_steps(steps: dict[str, list[list[Span]]], world_size: int) -> Thumbnail:
    """One step of as many variants and ranks as there is room for."""
    num_ranks = min(world_size, MOST_RANKS)
    names = list(steps)[: MOST_ROWS // num_ranks]
    shown = [steps[name][:num_ranks] for name in names]
    columns = COLUMNS
    while len(drawing := rows(shown, columns)) > MOST_BYTES:
        columns //= 2
    which = "each variant" if len(names) == len(steps) else f"the first {len(names)} of {len(steps)} variants"
    told = f"a step of {which}" + (f", {num_ranks} of {world_size} ranks" if num_ranks < world_size else "")
    height = len(names) * (num_ranks * PITCH + BETWEEN) - BETWEEN
    return Thumbnail(svg(drawing, told, columns, height), told)


def rows(shown: Sequence[OfRanks], columns: int) -> str:
    """The paths of all rows, one a colour: its stretches as horizontal strokes, in columns."""
    longest_s = max(step_seconds(of_ranks) for of_ranks in shown)
    strokes: dict[str, list[str]] = {"": []}  # by kind; the first is the ground that is seen where a rank is idle
    top = ROW / 2
    for of_ranks in shown:
        for spans in of_ranks:
            strokes[""].append(f"M0 {top:g}h{round(columns * step_seconds(of_ranks) / longest_s)}")
            first = 0
            for kind, stretch in groupby(painted(spans, columns, longest_s)):
                length = len(list(stretch))
                if kind:
                    strokes.setdefault(kind, []).append(f"M{first} {top:g}h{length}")
                first += length
            top += PITCH
        top += BETWEEN
    looks = {kind: f'stroke="{KINDS[kind][1]}"' if kind else 'class="idle"' for kind in strokes}
    return "".join(f'<path {looks[kind]} d="{"".join(parts)}"/>' for kind, parts in strokes.items())


def painted(spans: Sequence[Span], columns: int, longest_s: float) -> list[str]:
    """The kind of the innermost span at the middle of each column; empty where the rank is idle."""
    row = [""] * columns
    for span in sorted(spans, key=lambda span: ORDER.index(span.kind)):
        first, end = (max(0, round(columns * moment_s / longest_s)) for moment_s in (span.start_s, span.end_s))
        row[first:end] = [span.kind] * (end - first)
    return row


def finite(curve: charts.Curve) -> list[tuple[float, float]]:
    """The points of a curve that have a place; a loss may be NaN."""
    pairs = zip(*curve, strict=True)
    return [(x, y) for x, y in pairs if x is not None and y is not None and math.isfinite(y)]


def of_losses(found: dict[str, list[tuple[float, float]]]) -> Thumbnail:
    """The loss curves of a run that marked no time."""
    names = list(found)[:MOST_CURVES]
    hues = charts.colours(names)
    every = [point for name in names for point in found[name]]
    (left, right), (low, high) = ((min(values), max(values)) for values in zip(*every, strict=True))
    lines = []
    for name in names:
        step = math.ceil(len(found[name]) * len(names) / MOST_POINTS)
        points = " ".join(
            f"{WIDTH * (x - left) / (right - left):.0f},{4 + (HEIGHT - 8) * (high - y) / ((high - low) or 1):.0f}"
            for x, y in found[name][::step]
        )
        lines.append(f'<polyline stroke="{hues[name]}" points="{points}"/>')
    which = "losses" if len(names) == len(found) else f"the first {len(names)} of {len(found)} losses"
    return Thumbnail(svg("".join(lines), which, WIDTH, HEIGHT), which)


def svg(drawing: str, told: str, width: float, height: float) -> Markup:
    """An SVG that is as wide as its place, at most three times as high as its rows need."""
    return Markup(
        f'<svg viewBox="0 0 {width} {height}" preserveAspectRatio="none" style="height:{min(HEIGHT, 3 * height)}px"'
        f' role="img" aria-label="{text(told)}">{drawing}</svg>'
    )
