"""Marks on a chart: each where it happened, with a number that can be read."""

import re

import pytest

from distlab.report import charts
from distlab.report.charts import Mark, labelled, marked
from tests.report.test_charts import shown

pytestmark = pytest.mark.timeout(60)


def test_a_crowd_has_one_label() -> None:
    assert labelled([0.0, 1.0, 1.1, 1.2, 5.0], 0.5) == ["1", "2-4", "", "", "5"]
    assert labelled([], 0.5) == []


def test_each_mark_is_a_line_of_its_own_where_it_happened_and_each_kind_is_in_the_legend() -> None:
    figure = charts.line_chart({"flat": ([0.0, 10.0], [5.0, 5.0])}, "s", "samples/s", {}, points=9)
    marks = [Mark(2.0, "kill", "#aa0000"), Mark(4.0, "pause", "#00aa00"), Mark(8.0, "kill", "#aa0000")]
    svg = shown(marked(figure, marks, 10.0, 6.0))
    series = dict(re.findall(r'<g class="series" data-n="(\w+)" style="--hue:[^"]*">(.*?)</g>', svg))
    (curve,) = re.findall(r'd="M([\d.]+) [\d.]+ L?([\d.]+)', series["flat"])
    left, width = float(curve[0]), float(curve[1]) - float(curve[0])
    places = {kind: [float(x) for x in re.findall(r'd="M([\d.]+) ', series[kind])] for kind in ("kill", "pause")}
    assert places["kill"] == pytest.approx([left + 0.2 * width, left + 0.8 * width], abs=0.2)
    assert places["pause"] == pytest.approx([left + 0.4 * width], abs=0.2)
    assert re.findall(r'class="label"[^>]*>([^<]*)<', svg) == ["1", "3", "2"]
    assert svg.count('<i class="dashed">') == 2
