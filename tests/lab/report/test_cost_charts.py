"""Samples a second over a run, from records that were made up: where nothing stood, and what happened there."""

import re

import pytest

from distlab.lab.report.cost_charts import Course, courses, covered, curve, events, pace
from distlab.lab.report.page import page
from distlab.lab.report.records import Changed, Failed
from distlab.lab.report.verdict import judge
from tests.lab.report.made_up import BEGAN, drilled_run, good_run, plus, stood

pytestmark = pytest.mark.timeout(60)


def test_a_page_without_times_of_steps_is_as_before() -> None:
    assert pace(judge(good_run()), good_run()) == []
    text = page(judge(good_run()), good_run())
    assert "Samples a second" not in text


def test_a_pause_is_a_valley_with_its_mark() -> None:
    records = drilled_run()
    text = page(judge(records), records)
    assert "<h2>Samples a second</h2>" in text
    assert re.search(r"<td class=n>1</td><td class=n>3\.00</td><td class=w>pause rank 1 for 2 s at step 30</td>", text)


def test_variants_in_turn_are_one_course_and_those_behind_each_other_have_their_own() -> None:
    (both,) = courses(drilled_run())
    assert both.variants == ["flat", "ring"] and len(both.times) == 100
    records = plus(good_run(), stood("restart", 0, 10), stood("join", 2, 10))
    one, other = courses(records)
    assert (one.variants, other.variants, one.until) == (["restart"], ["join"], BEGAN + 2)


def test_who_goes_on_is_counted_where_the_first_one_falls_silent() -> None:
    first, other = [1.0, 2.0, 3.0], [1.1, 2.1, 3.1, 4.1, 5.1]
    assert covered([other, first]) == [1.0, 2.0, 3.0, 4.1, 5.1]
    assert covered([first]) == first


def test_the_area_of_the_curve_is_the_samples() -> None:
    times = [0.1 * number for number in range(1000)] + [105 + 0.1 * number for number in range(500)]
    x, y = curve(times, 16, 2, 160.0)
    area = sum(y[place] * (x[place + 1] - x[place]) for place in range(0, len(x), 2))
    assert area == pytest.approx(16 * (len(times) - 1), rel=0.01)
    assert min(y) < 20 < 150 < y[0]
    assert len(x) <= 2 * 121
    assert curve([0.0, 1.0, 2.0, 2.5], 16, 2, 2.5)[0] == [0.0, 2.0, 2.0, 2.5]
    assert curve([0.0, 1.0], 16, 1, 3.0) == ([0.0, 1.0, 1.0, 3.0], [16.0, 16.0, 0.0, 0.0])


def test_a_change_of_members_is_told_once_by_who_noticed_it_first() -> None:
    records = plus(good_run(), stood("join", 0, 50), Changed("join", 7, BEGAN + 1.0, "lost", [0, 2]))
    records = plus(records, Changed("join", 7, BEGAN + 0.9, "lost", [0, 2]), rank=2)
    records = plus(records, Changed("join", 9, BEGAN + 1.3, "asked", [0, 2, 1]), rank=2)
    (course,) = courses(records)
    found = events(judge(records), records, course)
    assert [(each.kind, round(each.at - BEGAN, 1)) for each in found] == [("rank lost", 0.9), ("rank joined", 1.3)]
    assert found[0].told == "rank lost: from step 7 on ranks 0 2"
    assert events(judge(records), records, Course(["spare"], [BEGAN, BEGAN + 9])) == []


def test_the_end_of_a_run_that_broke_is_on_its_curve() -> None:
    records = plus(good_run(), stood("flat", 0, 30), Failed(3, "rank 1 lost at step 9: silent", BEGAN + 6.0))
    (course,) = courses(records)
    (end,) = events(judge(records), records, course)
    assert (end.kind, end.told) == ("end", "rank 1 lost at step 9: silent")
