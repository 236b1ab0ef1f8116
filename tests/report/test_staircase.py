"""The staircase to the letter, on steps small enough to draw by hand."""

from distlab.report.records import Comparison
from distlab.report.tables import LEGEND, rows, sign, staircases
from distlab.report.timeline_data import Span
from distlab.report.verdict import judge
from tests.report.made_up import pipeline_run, without


def test_two_stages_and_two_microbatches() -> None:
    """Forward 2 columns, backward 4: the bubble of rank 0 lies in the middle, that of rank 1 at both ends."""
    first = [Span("forward", "0", 0, 2), Span("forward", "1", 2, 4), Span("receive", "0", 4, 8)]
    first += [Span("backward", "0", 8, 12), Span("backward", "1", 14, 18), Span("optimizer", "", 18, 20)]
    last = [Span("receive", "0", 0, 2), Span("forward", "0", 2, 4), Span("backward", "0", 4, 8)]
    last += [Span("forward", "1", 8, 10), Span("backward", "1", 10, 14), Span("send", "1", 14, 15)]
    last += [Span("optimizer", "", 15, 17)]
    assert rows([first, last], columns=20) == [
        "rank 0 |0011....aaaa..bbbb++|",
        "rank 1 |..00aaaa11bbbb-++...|",
    ]


def test_the_inner_span_counts_and_the_longer_part_of_a_column() -> None:
    spans = [Span("forward", "3", 0.0, 8.0), Span("all_reduce", "", 2.0, 3.0), Span("wait", "", 4.0, 5.0)]
    spans += [Span("backward", "3", 8.0, 8.4), Span("optimizer", "", 9.0, 10.0)]
    assert rows([spans], columns=10) == ["rank 0 |33-3.333.+|"]
    assert rows([spans, []], columns=10)[1] == "rank 1 |..........|"


def test_numbers_and_letters_begin_anew() -> None:
    assert [sign(Span("forward", str(number), 0, 1)) for number in (0, 9, 10, 23)] == ["0", "9", "0", "3"]
    assert [sign(Span("backward", str(number), 0, 1)) for number in (0, 25, 26)] == ["a", "z", "a"]
    assert sign(Span("forward", "", 0, 1)) == "0"


def test_every_variant_with_a_bubble_is_drawn() -> None:
    records = pipeline_run(2, 2, ("1f1b", "gpipe"))
    lines = list(staircases(judge(records), records))
    assert lines[0] == "1f1b: bubble 0.37 measured, 0.33 by (p-1)/(m+p-1)"
    assert lines[3].startswith("gpipe: bubble ")
    assert [line[:8] for line in lines[1:3] + lines[4:6]] == ["rank 0 |", "rank 1 |"] * 2
    assert {len(line) for line in lines[1:3]} == {len("rank 0 ||") + 64}
    assert lines[6:] == [LEGEND]


def test_without_a_bubble_nothing_is_drawn() -> None:
    records = without(Comparison, pipeline_run())
    assert list(staircases(judge(records), records)) == []
