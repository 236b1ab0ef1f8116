"""The numbers of the curves over WORLD_SIZE, on runs that never were."""

from pathlib import Path
from typing import Any

import pytest

from distlab.report.compare import differing, incomparable, scaling
from distlab.report.records import Run
from distlab.report.verdict import judge
from tests.report.made_up import good_run


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
