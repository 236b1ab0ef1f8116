"""Two runs in one table: what differs, what failed, and the numbers beside each other."""

from pathlib import Path
from typing import Any

from msgspec.structs import replace

from distlab.lab.report.compare import comparison, names
from distlab.lab.report.records import Ranks, Run, Start, Steps
from distlab.lab.report.verdict import judge
from tests.lab.report.made_up import bent, good_run, with_check, without


def rows_of(old: Ranks, new: Ranks) -> dict[str, list[Any]]:
    """The rows of the table by their first cell."""
    rows = comparison((Path("a"), judge(old), old), (Path("b"), judge(new), new)).rows
    assert len({row[0] for row in rows}) == len(rows)
    return {row[0]: list(row[1:]) for row in rows}


def test_numbers_of_both_runs_are_in_a_row_with_their_ratio() -> None:
    found = rows_of(good_run(4, variants={"naive": 80e-3}), good_run(4, variants={"naive": 40e-3}))
    time_s = found["naive: ms per step, slowest rank's median"]
    assert time_s[-1] == f"{float(time_s[1]) / float(time_s[0]):.2f}" == "0.50"
    assert found["naive: sent per step, rank that sends most"] == ["9.70 MB", "9.70 MB", "1.00"]
    assert found["naive: peak memory, fullest rank"] == ["20.6 MB", "20.6 MB", "1.00"]
    assert found["naive: last loss"][0] == found["naive: last loss"][1]


def test_what_was_not_measured_in_a_run_has_no_ratio() -> None:
    found = rows_of(good_run(2), without(Steps, good_run(2)))
    assert found["naive: ms per step, slowest rank's median"][1:] == ["-", ""]
    untimed = rows_of(without(Steps, good_run(2)), without(Steps, good_run(2)))
    assert "naive: ms per step, slowest rank's median" not in untimed


def test_settings_that_differ_are_rows_and_others_are_none() -> None:
    def change(record: Any) -> Any:
        config = {"LAB_WIDTH": 64, "MASTER_PORT": 6}
        return replace(record, run_mode="tp", config=record.config | config) if isinstance(record, Start) else record

    found = rows_of(good_run(2), bent(good_run(2), change))
    assert found["LAB_WIDTH"] == ["unset", "64", ""] and found["RUN_MODE"] == ["dp", "tp", ""]
    assert "MASTER_PORT" not in found
    other = bent(good_run(2), lambda r: replace(r, versions={"torch": "3"}) if isinstance(r, Start) else r)
    assert found.keys() - {"LAB_WIDTH", "RUN_MODE"} < rows_of(good_run(2), other).keys()
    assert rows_of(good_run(2), other)["version of torch"][1] == "3"


def test_a_check_that_failed_or_was_not_made_is_a_row_and_one_that_passed_in_both_is_none() -> None:
    found = rows_of(good_run(3), with_check(good_run(3), "weights", 1.0))
    assert found["verdict"] == ["PASS", "FAIL", ""]
    assert found["naive weights"] == ["passed", "FAILED", ""]
    assert "naive gradients" not in found and "naive weights" not in rows_of(good_run(3), good_run(3))


def test_runs_of_one_name_go_by_their_folders() -> None:
    run: Run = judge(good_run(2))
    assert names((Path("a/x"), run, {}), (Path("b/y"), run, {})) == ["x", "y"]
    assert names((Path("a/x"), run, {}), (Path("b/x"), run, {})) == ["a/x", "b/x"]
    assert names((Path("a/x"), run, {}), (Path("b/x"), run | {"run_id": "z"}, {})) == [run["run_id"], "z"]
