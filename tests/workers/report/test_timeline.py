"""The timeline as text and figures: every span a bar until there are too many, shares and the slowest rank by hand."""

from dataclasses import replace

import pytest

from tests.workers.report.made_up import bent, good_run, pipeline_run, plus, without
from tests.workers.report.test_page import drawn, luminance
from workers.report.judge import judge
from workers.report.records import Overlap, Profile, Record, Timeline
from workers.report.spans import KINDS, Span, bubble_sentence, own_work, slowest_rank, timelines
from workers.report.timeline import coarse, communication_hidden, fitted, gantt, training_profile

SECONDS = {
    "data": 0.001,
    "forward": 0.01,
    "backward": 0.02,
    "communication": 0.03,
    "optimizer": 0.004,
    "waiting": 0.005,
}


def test_every_span_is_a_bar_of_its_length() -> None:
    figure = gantt(
        [
            [Span("forward", "3", 0.001, 0.0035)],
            [Span("receive", "4", 0.0, 0.0035), Span("forward", "4", 0.0035, 0.006)],
        ]
    )
    bars = {bar.name: bar for bar in figure.data}
    assert list(bars) == ["forward", "receive"]
    assert (bars["forward"].y, bars["forward"].base, bars["forward"].x) == ((0, 1), (1.0, 3.5), (2.5, 2.5))
    assert bars["forward"].text == ("3", "4")
    assert bars["receive"].text is None  # the only one of its kind needs no number
    assert figure.layout.xaxis.range == (0, 6.0)
    # The page's look fixes the other axis.
    assert figure.layout.xaxis.fixedrange is False and figure.layout.yaxis.fixedrange is None


def test_inner_spans_are_drawn_over_outer_ones_and_lower() -> None:
    spans = [Span("forward", "0", 0.0, 1.0), Span("all_reduce", "", 0.2, 0.4), Span("wait", "", 0.3, 0.4)]
    outer, inner, innermost = gantt([spans]).data
    assert outer.width > inner.width > innermost.width
    assert [bar.name for bar in (outer, inner, innermost)] == ["forward", "all-reduce", "wait"]


def test_the_page_shows_a_gantt_a_variant_with_its_bubble() -> None:
    shown = drawn(pipeline_run())
    timeline = shown[shown.index("<h2>Timeline</h2>") : shown.index("<h2>Training profile</h2>")]
    assert timeline.count("Plotly.newPlot") == 2
    assert timeline.count("bubble 0.31 measured, 0.27 by (p-1)/(m+p-1)") == 2
    for name in ("forward", "backward", "send", "receive", "optimizer", "idle"):
        assert f"</i>{name}</span>" in timeline
    assert "</i>all-reduce</span>" not in timeline


def test_a_run_without_marks_has_no_timeline() -> None:
    shown = drawn(good_run())
    assert "<h2>Timeline</h2>" not in shown and "<h2>Training profile</h2>" not in shown
    assert "<h2>Timeline</h2>" in drawn(without(Overlap, pipeline_run()))


def test_too_many_bars_become_fewer_and_the_long_ones_stay() -> None:
    spans = [Span("forward", "0", 0.0, 0.5), Span("backward", "0", 0.5, 0.9)]
    spans += [Span("all_reduce", "", 0.9 + k * 1e-4, 0.9 + k * 1e-4 + 6e-5) for k in range(1000)]
    found = {"naive": [spans, spans]}
    assert fitted(found, 2004) is found
    fewer = fitted(found, 300)["naive"]
    assert sum(map(len, fewer)) <= 300
    assert all(of_rank[:2] == spans[:2] for of_rank in fewer)
    joined = [span for span in fewer[0] if span.kind == "all_reduce"]
    assert joined and joined[-1].end_s == pytest.approx(spans[-1].end_s, abs=0.01)
    assert sum(map(len, fitted(found, 0)["naive"])) <= 4  # the narrowest that one may ask for


def test_only_short_neighbours_are_joined() -> None:
    spans = [
        Span("send", "0", 0.0, 0.1),
        Span("send", "1", 0.11, 0.2),
        Span("send", "2", 5.0, 6.0),
        Span("send", "3", 9.0, 9.1),
    ]
    assert coarse(spans, 0.2) == [Span("send", "", 0.0, 0.2), Span("send", "2", 5.0, 6.0)]
    assert coarse(spans, 0.01) == spans


def test_a_page_of_eight_ranks_and_six_pipelines_keeps_its_bars() -> None:
    records = pipeline_run(8, 8, tuple("abcdef"))
    number = sum(len(spans) for of_ranks in timelines(records, 8).values() for spans in of_ranks)
    assert number > 1500
    assert drawn(records).count('"orientation":"h","') >= 6 * 5
    assert fitted(timelines(records, 8), number)["a"] == timelines(records, 8)["a"]


def test_spans_come_outer_first_and_a_rank_may_have_none() -> None:
    marks = [["all_reduce", "", 0.2, 0.4], ["forward", "0", 0.2, 1.0]]
    found = timelines(plus({0: [], 1: []}, Timeline("flat", 3, marks), rank=1), 2)
    assert [span.kind for span in found["flat"][1]] == ["forward", "all_reduce"] and found["flat"][0] == []


def test_what_was_hidden_in_per_cent() -> None:
    records = plus(good_run(2), Overlap("ring", 0.008, 0.002), Overlap("flat", 0.0, 0.0))
    shown = communication_hidden(judge(records), records)
    assert "25 % of 8.00 ms" in shown and "nothing sent" in shown
    assert communication_hidden(judge(good_run(2)), good_run(2)) == ""


def test_the_slowest_rank_has_the_most_work_of_its_own() -> None:
    """Rank 1 computes longest; rank 0 spends more in all, waiting for it inside its all-reduce."""
    waits, works = SECONDS | {"communication": 0.9}, SECONDS | {"backward": 0.055}
    assert own_work(SECONDS) == pytest.approx(0.035)
    rank, ratio = slowest_rank([waits, works, None])
    assert (rank, round(ratio, 9)) == (1, 2.0)
    assert slowest_rank([dict.fromkeys(SECONDS, 0.0)]) == (0, float("inf"))


def test_the_profile_names_the_slowest_rank() -> None:
    def change(record: Record) -> Record:
        return replace(record, seconds=SECONDS | {"forward": 0.045}) if isinstance(record, Profile) else record

    records = bent(pipeline_run(2, 2, ("1f1b",)), change, rank=1)
    shown = training_profile(judge(records), records)
    assert shown.count("slowest, ") == 1
    assert "<td class=n>45.0 (43)</td>" in shown and "slowest, 1.13 ×" in shown  # 70 ms to 62


def test_the_profile_of_too_many_is_that_of_the_slowest_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    records = pipeline_run(2, 2, ("gpipe", "1f1b"))
    assert training_profile(judge(records), records).count("<tr>") == 1 + 4
    monkeypatch.setattr("workers.report.timeline.MOST_PROFILES", 3)
    shown = training_profile(judge(records), records)
    assert shown.count("<tr>") == 1 + 2 and shown.count("slowest, ") == 2 and "the others are in the records" in shown


def test_a_bubble_is_told_only_where_it_was_compared() -> None:
    run = judge(pipeline_run())
    assert bubble_sentence(run, "gpipe") == "bubble 0.31 measured, 0.27 by (p-1)/(m+p-1)"
    assert bubble_sentence(run, "naive") == ""


@pytest.mark.parametrize("kind", KINDS)
def test_bars_can_be_told_from_both_grounds_and_bear_white_text(kind: str) -> None:
    hue = luminance(KINDS[kind][1]) + 0.05
    assert hue / (luminance("#151b24") + 0.05) >= 3
    assert 1.05 / hue >= 4.5


def test_kinds_nest_in_the_order_in_which_they_are_drawn() -> None:
    widths = [width for _, _, width in KINDS.values()]
    assert widths == sorted(widths, reverse=True)
