"""The picture of a run: whose time is which colour, what it falls back to, and how large it may become."""

import re
from collections.abc import Sequence
from typing import Any

import pytest

from tests.workers.report.made_up import good_run, pipeline_run, plus, without
from workers.report.records import Losses, Ranks, Timeline
from workers.report.spans import KINDS, Span
from workers.report.thumbnail import MOST_BYTES, painted, thumbnail

STROKE = re.compile(r"M(\d+) ([\d.]+)h(\d+)")


def strokes(drawing: str, kind: str) -> list[tuple[int, float, int]]:
    """First column, height and length of each stroke in the colour of a kind."""
    (path,) = re.findall(rf'<path stroke="{KINDS[kind][1]}" d="(.*?)"/>', drawing)
    return [(int(x), float(y), int(length)) for x, y, length in STROKE.findall(path)]


def timed(spans: Sequence[list[list[Any]]], variant: str = "flat") -> Ranks:
    return {rank: [Timeline(variant, 3, of_rank)] for rank, of_rank in enumerate(spans)}


def test_a_column_has_the_innermost_span_that_holds_its_middle() -> None:
    spans = [Span("backward", "0", 0.0, 0.5), Span("all_reduce", "", 0.2, 0.3), Span("wait", "", 0.7, 0.704)]
    row = painted(spans, 10, 1.0)
    assert row == ["backward"] * 2 + ["all_reduce"] + ["backward"] * 2 + [""] * 5


def test_each_rank_is_a_row_and_variants_share_the_time() -> None:
    records = timed([[["forward", "0", 0.0, 1.0]], [["forward", "0", 0.5, 1.0]]])
    records[0].append(Timeline("ring", 3, [["forward", "0", 0.0, 0.25]]))
    found = thumbnail(records, 2, "dp")
    assert strokes(found.drawing, "forward") == [(0, 2.5, 240), (120, 8.5, 120), (0, 18.5, 60)]
    assert STROKE.findall(found.drawing)[:4] == [
        ("0", "2.5", "240"),
        ("0", "8.5", "240"),
        ("0", "18.5", "60"),
        ("0", "24.5", "60"),
    ]
    assert found.told == "a step of each variant"
    assert 'aria-label="a step of each variant"' in found.drawing


def test_what_there_is_no_room_for_is_said() -> None:
    records: Ranks = {
        rank: [Timeline(f"v{number}", 1, [["forward", "0", 0.0, 1.0]]) for number in range(5)] for rank in range(9)
    }
    found = thumbnail(records, 64, "dp")
    assert found.told == "a step of the first 3 of 5 variants, 8 of 64 ranks"
    assert len(strokes(found.drawing, "forward")) == 3 * 8


def test_no_picture_is_large() -> None:
    spans = [[["forward" if n % 2 else "backward", "", n / 400, (n + 1) / 400] for n in range(400)] for _ in range(8)]
    found = thumbnail(timed(spans), 8, "pp")
    assert len(found.drawing) < MOST_BYTES + 200
    assert 'viewBox="0 0 240 ' not in found.drawing
    assert 'viewBox="0 0 240 ' in thumbnail(pipeline_run(2), 2, "pp").drawing


def test_without_a_timeline_the_losses_are_drawn() -> None:
    found = thumbnail(good_run(2), 2, "dp")
    assert (found.told, found.drawing.count("<polyline")) == ("losses", 4)
    values = [4.0, float("nan"), 2.0, 3.0]
    drawn = thumbnail({0: [Losses("flat", values)]}, 1, "dp").drawing
    assert 'points="0,4 160,92 240,48"' in drawn
    assert thumbnail({0: [Losses(f"v{n}", [1.0, 1.0]) for n in range(9)]}, 1, "dp").told == "the first 8 of 9 losses"
    long = thumbnail({0: [Losses(f"v{n}", [1.0] * 5000) for n in range(8)]}, 1, "dp").drawing
    assert len(long) < MOST_BYTES + 500


def test_without_losses_the_mode_stands_there() -> None:
    assert thumbnail(without(Losses, good_run(2)), 2, "<comm>").drawing == "<span>&lt;comm&gt;</span>"
    assert thumbnail(plus({0: []}, Losses("flat", [1.0])), 1, "").drawing == "<span>?</span>"


@pytest.mark.parametrize(
    "spans", [[["forward", "0", 0.0]], [["unheard-of", "0", 0.0, 1.0]], [["forward", "0", 0.0, float("nan")]]]
)
def test_spans_that_are_none_are_refused(spans: list[list[object]]) -> None:
    with pytest.raises((ValueError, TypeError)):
        thumbnail({0: [Timeline("flat", 1, spans)]}, 1, "dp")
