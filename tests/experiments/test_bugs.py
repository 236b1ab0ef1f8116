"""Every LAB_BUG of every mode, through the whole experiment: the check that is meant for it fails, by name."""

import pytest

from distlab.lab.config.settings import modes
from distlab.lab.rank.mode_loader import load
from distlab.lab.report.records import End
from tests.interface import claims_of
from tests.labs import Runs, failed, shows_in_all
from tests.mistakes import WORLD_SIZE, WORLD_SIZE_SHOWN, mistaken, shown, whole

BUGS = [(mode, bug) for mode in modes() for bug in load(mode).mistakes]


@pytest.mark.parametrize("run_mode", modes())
def test_every_check_passes_without_a_bug(runs: Runs, run_mode: str) -> None:
    run = runs(WORLD_SIZE_SHOWN, **shown(run_mode)).judged
    assert failed(run) == set()
    assert run["verdict"] == "pass"


@pytest.mark.parametrize("run_mode", modes())
def test_every_check_passes_at_the_sizes_for_bugs(runs: Runs, run_mode: str) -> None:
    run = runs(WORLD_SIZE, **whole(run_mode)).judged
    assert failed(run) == set()
    assert run["verdict"] == "pass"
    names = {claim["name"] for claim in run["checks"] + run["comparisons"]}
    assert not [name for name in claims_of(run_mode, "made") if name not in names]


@pytest.mark.parametrize(("run_mode", "bug"), BUGS)
def test_each_bug_fails_its_check(runs: Runs, run_mode: str, bug: str) -> None:
    mistakes, given = load(run_mode).mistakes, mistaken(run_mode, bug)
    meant = mistakes[bug].check
    # The run of a mode's first bug goes on to its end; what else a wrong number meets there, the others need not show.
    until = "" if bug == next(iter(mistakes)) else meant
    run = runs(int(given.pop("WORLD_SIZE", WORLD_SIZE)), until, **given).judged
    assert meant in failed(run)
    claims = [claim for claim in run["checks"] + run["comparisons"] if claim["name"] == meant and not claim["passed"]]
    seen = {claim["variant"] for claim in claims}
    assert shows_in_all(seen, given["LAB_VARIANT"].split(",")), "a variant that can make it does not show it"
    assert run["verdict"] == "fail"


def test_a_run_ends_once_its_check_failed_everywhere(runs: Runs) -> None:
    """And goes on to the end where it holds, or where it fails in one variant of two."""
    small = {"RUN_MODE": "dp", "LAB_MODEL": "mlp", "LAB_DEPTH": "1", "LAB_STEPS": "1"}
    for variants, bug, until, is_whole in (
        ("flat,bucketed", "stale_bucket", "weights", False),  # which flat and bucketed make
        ("flat,bucketed", "stale_bucket", "samples", True),
        ("flat,per_parameter", "stale_bucket", "weights", True),
    ):
        ran = runs(WORLD_SIZE, until, LAB_BUG=bug, LAB_VARIANT=variants, **small)
        assert "weights" in failed(ran.judged)
        assert len(ran.judged["variants"]) == 2 * is_whole, (variants, until)
        assert all(isinstance(of_rank[-1], End) for of_rank in ran.records.values())
