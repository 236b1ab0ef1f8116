"""Several runs on one page: their curves, the numbers beside them, and what differs."""

import re
from pathlib import Path

from msgspec.structs import replace

from distlab.report.compare import Judged, comparison, named, together
from distlab.report.records import Ranks, Start, Steps
from distlab.report.verdict import judge
from tests.report.made_up import bent, good_run, with_check

CHARTS = ("samples a second", "efficiency", "MB on the wire a step, from the rank that sends most", "MB at the peak, on the rank that holds most")  # fmt: skip


def judged(*runs: Ranks) -> list[Judged]:
    return named([(Path(f"runs/{index}"), judge(records), records) for index, records in enumerate(runs)])


def rows(page: str) -> list[list[str]]:
    """The cells of all rows of tables, as text."""
    found = re.findall(r"<tr>(.*?)</tr>", page)
    return [[re.sub("<.*?>", "", cell) for cell in re.findall(r"<t[dh].*?>(.*?)</t[dh]>", row)] for row in found]


def drawn(page: str) -> list[str]:
    return re.findall(r'aria-label="(.*?) over WORLD_SIZE"', page)


def test_runs_of_several_worlds_have_four_curves_and_their_numbers() -> None:
    page = together(judged(good_run(4), good_run(1), good_run(2)))
    assert drawn(page) == list(CHARTS)
    told = [row for row in rows(page) if row[:1] == ["naive"]]
    assert [row[1:3] for row in told] == [["1", "1"], ["2", "1"], ["4", "1"]]
    assert told[0][3:] == ["81.2", "197", "1.00", "-", "20.0 MB"]
    assert told[2][5:] == ["0.25", "9.70 MB", "20.6 MB"]
    assert "Settings and versions are alike" in page


def test_runs_of_one_world_have_numbers_and_no_curve() -> None:
    page = together(judged(good_run(2), good_run(2), good_run(2)))
    assert drawn(page) == []
    assert ["naive", "2", "3"] in [row[:3] for row in rows(page)]
    assert "here up to 3, count by their median" in page


def test_what_differs_and_what_failed_is_said() -> None:
    wide = bent(good_run(4), lambda r: replace(r, config=r.config | {"LAB_WIDTH": 64}) if isinstance(r, Start) else r)
    page = together(judged(good_run(2), wide, with_check(good_run(3), "weights", 1.0)))
    assert "These runs differ in more than WORLD_SIZE: LAB_WIDTH." in page
    assert [row[1:4] for row in rows(page)[1:4]] == [
        ["PASS", "2", "unset"],
        ["FAIL", "3", "unset"],
        ["PASS", "4", "64"],
    ]


def test_a_variant_that_was_left_out_is_named() -> None:
    page = together(judged(good_run(2), good_run(3), good_run(4)))
    assert ["3", "sharded", "8 heads cannot be dealt to 3 ranks"] in rows(page)


def test_two_runs_have_the_curves_where_their_worlds_differ() -> None:
    assert drawn(comparison(*judged(good_run(2), good_run(4)))) == list(CHARTS)
    alike = comparison(*judged(good_run(2), good_run(2)))
    other = bent(good_run(4), lambda r: replace(r, run_mode="tp") if isinstance(r, Start) else r)
    untimed = bent(good_run(4), lambda r: None if isinstance(r, Steps) else r)
    assert drawn(alike) == drawn(comparison(*judged(good_run(2), other))) == []
    assert "<h2>Time</h2>" in alike and "Over WORLD_SIZE" not in alike
    assert drawn(comparison(*judged(untimed, bent(good_run(2), lambda r: None if isinstance(r, Steps) else r)))) == []


def test_runs_of_one_name_go_by_their_folders() -> None:
    run = judge(good_run(2))
    assert [name for name, *_ in named([(Path("a/x"), run, {}), (Path("b/y"), run, {})])] == ["x", "y"]
    assert [name for name, *_ in named([(Path("a/x"), run, {}), (Path("b/x"), run, {})])] == ["a/x", "b/x"]
    assert [name for name, *_ in named([(Path("a/x"), run, {}), (Path("b/x"), run | {"run_id": "z"}, {})])] == [
        run["run_id"],
        "z",
    ]
