"""Marks on a chart over time: a dashed line where something happened, a colour a kind, with its number at the top.

Marks that stand too close for two numbers have one label: "3-5" says that the lines there are the third to the fifth.
"""

from collections.abc import Sequence
from typing import NamedTuple

from workers.report.charts import Figure, Pen

APART = 0.035  # of the width of the chart: closer than that numbers lie on each other
DASHES = "4 3"


class Mark(NamedTuple):
    """Something that happened: `x` as on the axis, `kind` as in the legend, which has one `hue` in a chart."""

    x: float
    kind: str
    hue: str


def marked(figure: Figure, marks: Sequence[Mark], width: float, top: float) -> Figure:
    """The figure with all marks, in the order of their x, up to `top`; its axis is `width` wide."""
    labels = labelled([mark.x for mark in marks], APART * width)
    figure.graph.config.allow_interruptions = True  # one line a mark
    figure.graph.config.print_labels = True
    pens = list(figure.pens)
    for kind, hue in {mark.kind: mark.hue for mark in marks}.items():
        points = []
        for mark, label in zip(marks, labels, strict=True):
            if mark.kind == kind:
                points += [(mark.x, 0.0), {"value": (mark.x, top), "label": label}, None]
        figure.graph.add(kind, points, show_dots=True, dots_size=1)
        pens.append(Pen(hue, 1.6, DASHES))
    return Figure(figure.graph, pens, legend=True)


def labelled(places: Sequence[float], apart: float) -> list[str]:
    """The number of each place from 1 in their order, or of a crowd "3-5" at its first and nothing at the others."""
    crowds: list[list[int]] = []
    for number, place in enumerate(places):
        if crowds and place - places[crowds[-1][0]] < apart:
            crowds[-1].append(number)
        else:
            crowds.append([number])
    labels = [""] * len(places)
    for crowd in crowds:
        labels[crowd[0]] = f"{crowd[0] + 1}" if len(crowd) == 1 else f"{crowd[0] + 1}-{crowd[-1] + 1}"
    return labels
