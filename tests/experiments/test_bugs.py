"""Every LAB_BUG of every mode, through the whole experiment: the check that is meant for it fails, by name."""

import importlib
from pathlib import Path

import pytest

from tests.labs import failed, run_experiment
from tests.ranks import Ranks
from workers.config import modes

# Enough variants for every mistake of the mode, and no more: a naive one makes dozens of calls a step.
NARROW = {"comm": "ring", "dp": "flat,bucketed,ddp", "tp": "naive,megatron", "pp": "gpipe,1f1b"}
BUGS = [(mode, bug) for mode in modes() for bug in importlib.import_module(f"experiments.{mode}").BUGS]


@pytest.mark.parametrize("mode", modes())
def test_without_a_bug_every_check_holds(ranks: Ranks, tmp_path: Path, mode: str) -> None:
    run, _ = run_experiment(ranks, 3, tmp_path, RUN_MODE=mode)
    assert failed(run) == set()
    assert run["verdict"] == "pass"


@pytest.mark.parametrize(("mode", "bug"), BUGS)
def test_each_bug_fails_the_check_that_is_meant_for_it(ranks: Ranks, tmp_path: Path, mode: str, bug: str) -> None:
    run, _ = run_experiment(ranks, 3, tmp_path, RUN_MODE=mode, LAB_BUG=bug, LAB_VARIANT=NARROW.get(mode, ""))
    meant = importlib.import_module(f"experiments.{mode}").BUGS[bug].check
    assert meant in failed(run)
    assert run["verdict"] == "fail"
