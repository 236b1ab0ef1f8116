"""Every LAB_BUG of every mode, through the whole experiment: the check that is meant for it fails, by name."""

import pytest

from distlab.config.settings import modes
from distlab.rank.mode_loader import load
from tests.interface import claims_of
from tests.labs import Runs, failed
from tests.mistakes import WORLD_SIZE, mistaken, whole

BUGS = [(mode, bug) for mode in modes() for bug in load(mode).mistakes]


@pytest.mark.parametrize("run_mode", modes())
def test_without_a_bug_every_check_holds(runs: Runs, run_mode: str) -> None:
    run = runs(WORLD_SIZE, **whole(run_mode)).judged
    assert failed(run) == set()
    assert run["verdict"] == "pass"
    names = {claim["name"] for claim in run["checks"] + run["comparisons"]}
    assert not [name for name in claims_of(run_mode, "made") if name not in names]


@pytest.mark.parametrize(("run_mode", "bug"), BUGS)
def test_each_bug_fails_the_check_that_is_meant_for_it(runs: Runs, run_mode: str, bug: str) -> None:
    given = mistaken(run_mode, bug)
    run = runs(int(given.pop("WORLD_SIZE", WORLD_SIZE)), **given).judged
    meant = load(run_mode).mistakes[bug].check
    assert meant in failed(run)
    claims = [claim for claim in run["checks"] + run["comparisons"] if claim["name"] == meant and not claim["passed"]]
    seen = {claim["variant"] for claim in claims}
    assert seen == {""} or seen >= set(given["LAB_VARIANT"].split(",")), "a variant that can make it does not show it"
    assert run["verdict"] == "fail"
