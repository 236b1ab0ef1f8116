"""Several runs on one page: their curves, the numbers beside them, and what differs."""

import re
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from distlab.report.compare import Judged, comparison, differing, incomparable, named, scaling, together
from distlab.report.records import Ranks, Run, Start, Steps
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


# The numbers of the curves over WORLD_SIZE, on runs that never were.


def run(world_size: int, seconds: list[float | None], *, name: str = "flat", **settings: Any) -> Run:
    """A run with one variant, of which each rank took so long a step."""
    variant = {
        "name": name, "step_seconds": seconds, "wire_bytes": [100.0 * world_size, None], "peak_bytes": [None, 7 * world_size]
    }  # fmt: skip
    config = {"LAB_BATCH": 16, "WORLD_SIZE": world_size} | settings
    return {"run_mode": "dp", "verdict": "pass", "world_size": world_size, "config": config, "versions": {"torch": "2"}, "variants": [variant]}  # fmt: skip


def test_a_point_is_the_slowest_rank_against_the_smallest_world() -> None:
    (flat,) = scaling([run(4, [0.4, 0.5]), run(1, [1.0])]).values()
    assert [(point.world_size, point.num_runs, point.efficiency) for point in flat] == [(1, 1, 1.0), (4, 1, 0.5)]
    assert flat[1].seen == (0.5, 32.0, 400.0, 28)


def test_efficiency_is_to_the_smallest_world_that_the_variant_was_timed_at() -> None:
    found = scaling([run(1, [1.0]), run(2, [0.5], name="ring"), run(4, [0.5], name="ring")])
    assert [point.efficiency for point in found["ring"]] == [1.0, 0.5]


def test_samples_are_those_of_each_runs_own_batch() -> None:
    (flat,) = scaling([run(1, [1.0]), run(2, [1.0], LAB_BATCH=32)]).values()
    assert [(point.seen.samples_per_s, point.efficiency) for point in flat] == [(16.0, 1.0), (32.0, 1.0)]


def test_of_several_runs_of_one_world_the_median_counts() -> None:
    runs = [run(2, [value]) for value in (0.1, 8.0, 0.2)]
    for one, nbytes in zip(runs, (5.0, 1.0, 900.0), strict=True):
        one["variants"][0] |= {"wire_bytes": [nbytes], "peak_bytes": [None]}
    (flat,) = scaling(runs).values()
    assert [(point.num_runs, point.seen) for point in flat] == [(3, (0.2, 80.0, 5.0, None))]


def test_what_was_not_measured_is_no_number() -> None:
    (flat,) = scaling(
        [run(2, [None, 0.5]) | {"variants": [run(2, [0.5])["variants"][0] | {"wire_bytes": [None]}]}]
    ).values()
    assert flat[0].seen.wire_bytes is None
    assert scaling([run(2, [None, None])]) == {}


def test_settings_and_versions_that_differ_are_named() -> None:
    one, other = (
        run(1, [1.0], LAB_WIDTH=8, LAB_SEED=1, MASTER_PORT=5),
        run(2, [1.0], LAB_WIDTH=9, LAB_SEED=2, MASTER_PORT=6),
    )
    assert differing([one, other]) == ["LAB_WIDTH"]
    assert differing([one, one | {"versions": {"torch": "3"}}]) == ["the version of torch"]
    assert differing([one, one]) == []


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({}, None),
        ({"run_mode": "tp"}, "runs/b is of RUN_MODE=tp, runs/a of dp: curves are of one mode"),
        ({"variants": [], "verdict": "lost"}, "runs/b timed no step (verdict lost): it has no point on a curve"),
    ],
)
def test_a_run_without_a_place_on_the_curves_is_named(change: Run, sentence: str | None) -> None:
    a, b = (judge(good_run(size)) for size in (2, 3))
    found = incomparable([(Path("runs/a"), a, {}), (Path("runs/b"), b | change, {})])
    assert found == ([sentence] if sentence else [])


def test_a_run_that_is_named_twice_is_seen(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "latest").symlink_to("a")
    a = judge(good_run(2))
    (fault,) = incomparable([(tmp_path / "a", a, {}), (tmp_path / "latest", a, {})])
    assert fault == f"{tmp_path}/latest is the run of {tmp_path}/a: each run counts once"
