"""Run every mode with each of its LAB_BUGs: the check that should catch the bug fails."""

import pytest

from distlab.lab.config.settings import modes
from distlab.lab.rank.mode_loader import load
from distlab.lab.report.records import End
from tests.interface import claims_of
from tests.labs import Runs, failed, shows_in_all
from tests.mistakes import PAGE_WORLD_SIZE, WORLD_SIZE, bug_settings, correct_settings, page_settings

BUGS = [(mode, bug) for mode in modes() for bug in load(mode).mistakes]


@pytest.mark.parametrize("run_mode", modes())
def test_every_check_passes_without_a_bug(runs: Runs, run_mode: str) -> None:
    run = runs(PAGE_WORLD_SIZE, **page_settings(run_mode)).judged
    assert failed(run) == set()
    assert run["verdict"] == "pass"


@pytest.mark.parametrize("run_mode", modes())
def test_every_check_passes_at_the_sizes_for_bugs(runs: Runs, run_mode: str) -> None:
    run = runs(WORLD_SIZE, **correct_settings(run_mode)).judged
    assert failed(run) == set()
    assert run["verdict"] == "pass"
    names = {claim["name"] for claim in run["checks"] + run["comparisons"]}
    assert not [name for name in claims_of(run_mode, "made") if name not in names]


@pytest.mark.parametrize(("run_mode", "bug"), BUGS)
def test_each_bug_fails_its_check(runs: Runs, run_mode: str, bug: str) -> None:
    mistakes, settings = load(run_mode).mistakes, bug_settings(run_mode, bug)
    expected = mistakes[bug].check
    # Only the run of a mode's first bug continues to its end, through all later sections; the others end once the check fails.
    until = "" if bug == next(iter(mistakes)) else expected
    run = runs(int(settings.pop("WORLD_SIZE", WORLD_SIZE)), until, **settings).judged
    assert expected in failed(run)
    claims = [
        claim for claim in run["checks"] + run["comparisons"] if claim["name"] == expected and not claim["passed"]
    ]
    failed_variants = {claim["variant"] for claim in claims}
    assert shows_in_all(failed_variants, settings["LAB_VARIANT"].split(",")), (
        "a variant that can have the bug passes the check"
    )
    assert run["verdict"] == "fail"


def test_a_run_ends_once_its_check_failed_everywhere(runs: Runs) -> None:
    """It continues to the end if the check passes, or fails in only one of two variants."""
    small = {"RUN_MODE": "dp", "LAB_MODEL": "mlp", "LAB_DEPTH": "1", "LAB_STEPS": "1"}
    for variants, bug, until, is_whole in (
        ("flat,bucketed", "stale_bucket", "weights", False),  # both variants have this bug
        ("flat,bucketed", "stale_bucket", "samples", True),
        ("flat,per_parameter", "stale_bucket", "weights", True),
    ):
        ran = runs(WORLD_SIZE, until, LAB_BUG=bug, LAB_VARIANT=variants, **small)
        assert "weights" in failed(ran.judged)
        assert len(ran.judged["variants"]) == 2 * is_whole, (variants, until)
        assert all(isinstance(of_rank[-1], End) for of_rank in ran.records.values())
