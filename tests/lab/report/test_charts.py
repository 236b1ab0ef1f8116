"""The charts: every number where it belongs, small, and nothing of a script in them."""

import math
import re

import pytest

from distlab.lab.report import charts
from distlab.lab.report.charts import Axis
from distlab.lab.report.html import ENVIRONMENT

pytestmark = pytest.mark.timeout(60)


def shown(figure: charts.Figure) -> str:
    """As the page has it."""
    parts = ENVIRONMENT.get_template("parts.html").module
    return str(getattr(parts, "chart")(charts.render_chart(figure, "a <title>", 200)))  # noqa: B009


def places(svg: str) -> list[list[float]]:
    """The coordinates of each curve."""
    return [
        [float(number) for number in re.findall(r"-?[\d.]+", path)]
        for path in re.findall(r'd="(M[^"]*)" class="line', svg)
    ]


def test_a_second_curve_of_a_colour_is_dashed_and_a_lower_one_is_wider() -> None:
    names = [f"variant {index}" for index in range(len(charts.PALETTE) + 1)]
    curves: dict[str, charts.Curve] = {name: ([0.0, 1.0], [1.0, 2.0]) for name in names}
    figure = charts.line_chart(curves, "x", "y", charts.colours(names), points=9)
    assert [pen.dashes for pen in figure.pens] == [""] * len(charts.PALETTE) + ["7 5"]
    layered = charts.line_chart(curves, "x", "y", charts.colours(names), points=9, layered=True).pens
    assert layered[0].width > layered[-1].width == 2.0
    assert "stroke-dasharray:7 5" in shown(figure) and shown(figure).count('<i class="dashed">') == 1


def test_a_curve_stands_where_its_numbers_are_and_has_a_gap_where_there_is_none() -> None:
    x, y = [float(step) for step in range(40)], [2.0 * step for step in range(40)]
    (line,) = places(shown(charts.line_chart({"flat": (x, y)}, "step", "loss", {}, points=99)))
    across, up = line[0::2], line[1::2]
    assert across == sorted(across) and up == sorted(up, reverse=True)  # down is up in an SVG
    ratio = [(up[0] - each) / (across[index] - across[0]) for index, each in enumerate(up) if index]
    assert max(ratio) - min(ratio) < 0.05
    y[20] = math.nan
    assert len(places(shown(charts.line_chart({"flat": (x, y)}, "step", "loss", {}, points=99)))[0]) < len(line)


def test_a_logarithmic_axis_has_powers_of_ten_and_leaves_out_what_has_no_logarithm() -> None:
    axis = Axis([0.0, 100.0, 1e6, None], log=True)
    assert axis.placed([0.0, 100.0, None, 1e6]) == [None, 2.0, None, 6.0]
    assert [axis.label(tick) for tick in axis.ticks()] == ["100", "1k", "10k", "100k", "1M"]
    assert [Axis([3.0, 97.0], log=False).label(tick) for tick in Axis([3.0, 97.0], log=False).ticks()] == [
        "20", "40", "60", "80"]  # fmt: skip
    assert Axis([], log=False).ticks() == []


def test_small_numbers_on_an_axis_are_not_rounded_away() -> None:
    svg = shown(charts.line_chart({"flat": ([0.0, 1.0], [0.0012, 0.0018])}, "x", "s", {}, points=9))
    assert "0.0012" in svg or "0.0014" in svg


def test_bars_stand_for_their_ranks_and_what_is_not_known_has_none() -> None:
    hues = {"called": charts.CALLED, "wire": charts.WIRE, "predicted": charts.PREDICTED}
    figure = charts.rank_bars({"called": [1e6, 2e6], "wire": [1.1e6, None], "predicted": [None, None]}, hues, 2e6)
    assert [pen.hue for pen in figure.pens] == [charts.CALLED, charts.WIRE]
    assert re.findall(r"<title>(.*?)</title>", shown(figure)) == ["1MB", "2MB", "1.1MB"]


def test_a_box_has_the_quartiles_of_its_numbers() -> None:
    svg = shown(charts.spreads({"flat": [float(value) for value in range(101)], "ddp": [7.0]}, {}, "ms"))
    assert "Q1 : 25\nQ2 : 50\nQ3 : 75" in svg and "Min: 5" in svg and "Max: 95" in svg


def test_layers_and_areas_are_stacked_by_class() -> None:
    hues = {"parameters": "#111111", "gradients": "#222222", "optimizer": "#333333"}
    bars = charts.layers({"a": {"parameters": 1, "gradients": 2}, "b": {"parameters": 3}}, hues)
    assert [pen.hue for pen in bars.pens] == ["#111111", "#222222"]
    assert re.findall(r"<title>(.*?)</title>", shown(bars)) == ["3B", "1B", "0B", "2B"]
    area = charts.stacked({"parameters": [1.0, 1.0], "gradients": [0.0, 2.0]}, 8.0, hues, "MB", 3.0)
    assert len(places(shown(area))) == 2


def test_nothing_of_a_script_or_of_a_style_is_in_a_chart_and_its_title_is_escaped() -> None:
    curve: charts.Curve = ([0.0, 1.0], [1.0, 2.0])
    svg = shown(charts.line_chart({"<old>": curve, "new": curve}, "step", "loss", {}, points=9))
    assert "<script" not in svg and "<style" not in svg and "<!--" not in svg
    assert 'aria-label="a &lt;title&gt;"' in svg and "&lt;old&gt;" in svg
    assert len(svg) < 4000


def test_a_curve_is_thinned_evenly_and_keeps_its_ends() -> None:
    x, y = charts.thinned((list(range(1001)), [0.123456789 * step for step in range(1001)]), 11)
    assert x == [100.0 * step for step in range(11)]
    assert y[-1] == 123.457
    assert charts.thinned(([0, 1], [5.0, float("nan")]), 100)[0] == [0, 1]


def test_a_variant_has_one_colour_in_all_charts() -> None:
    hues = charts.colours(["naive", "ddp", "naive"])
    assert list(hues) == ["naive", "ddp", "one process"]
    assert len(set(hues.values())) == 3
