"""Where the time of a step went, as text: shares and the slowest rank by hand."""

import pytest
from msgspec.structs import replace

from distlab.report import tables
from distlab.report.page import page
from distlab.report.records import Overlap, Profile, Record, Timeline
from distlab.report.timeline_data import KINDS, bubble_sentence, own_work, slowest_rank, timelines
from distlab.report.verdict import judge
from tests.report.made_up import bent, good_run, pipeline_run, plus
from tests.report.test_page import luminance

SECONDS = {
    "data": 0.001,
    "forward": 0.01,
    "backward": 0.02,
    "communication": 0.03,
    "optimizer": 0.004,
    "waiting": 0.005,
}


def test_spans_come_outer_first_and_a_rank_may_have_none() -> None:
    marks = [["all_reduce", "", 0.2, 0.4], ["forward", "0", 0.2, 1.0]]
    found = timelines(plus({0: [], 1: []}, Timeline("flat", 3, marks), rank=1), 2)
    assert [span.kind for span in found["flat"][1]] == ["forward", "all_reduce"] and found["flat"][0] == []


def test_what_was_hidden_in_per_cent() -> None:
    records = plus(good_run(2), Overlap("ring", 0.008, 0.002), Overlap("flat", 0.0, 0.0))
    assert tables.hidden(judge(records), records).rows == [
        ["ring", "25 % of 8.00 ms", ""],
        ["flat", "nothing sent", ""],
    ]
    assert tables.hidden(judge(good_run(2)), good_run(2)).rows == []


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
    fast, slow = tables.profile(judge(records), records, slowest_only=False).rows
    assert (slow[1], slow[4], slow[-1], fast[-1]) == ("rank 1", "45.0 (43)", "1.13 ×", "")  # 70 ms to 62
    assert tables.profile(judge(records), records, slowest_only=True).rows == [slow]


def test_the_profile_of_too_many_is_that_of_the_slowest_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    records = pipeline_run(2, 2, ("gpipe", "1f1b"))

    def profile() -> str:
        return page(judge(records), records).partition("<h2>Training profile</h2>")[2].partition("</section>")[0]

    assert profile().count("<tr>") == 1 + 4
    monkeypatch.setattr("distlab.report.tables.MOST_PROFILES", 3)
    shown = profile()
    assert shown.count("<tr>") == 1 + 2 and shown.count(" ×</td>") == 2 and "the others are in the records" in shown


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
