"""accelerate, transformers' Trainer and Lightning under `distlab check`, `prove` and `drill`, torchdata's loader under the
last one: `make frameworks`, which installs them.

A right script of each ends without a finding and without a question; six classic faults each are told by the user's
line, the framework's call and the remedy in its words. docs/check.md has the table.
"""

import re
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.frameworks.faults import ALONE, FAULTS, PACKAGES, SCRIPTS, Fault, versions
from tests.launched import clean, ended_warm
from tests.tools.check.cases import Checked, check, line_of


def checked(script: Path, world_size: int, folder: Path, **environ: str) -> Checked:
    """Under check as a user runs it: with no hash seed, an interpreter for each rank."""
    output = folder / "output"
    output.mkdir()
    return check(script, world_size, folder, str(output), LAB_HANG_AFTER_S="2", **environ)


@pytest.mark.parametrize("script", PACKAGES)
def test_the_versions_are_those_of_the_table(script: str) -> None:
    assert f"{PACKAGES[script]} {version(PACKAGES[script])}" == versions()[script]


@pytest.mark.parametrize("script", PACKAGES)
def test_nothing_is_said_of_a_right_one(script: str, tmp_path: Path) -> None:
    found = checked(SCRIPTS / f"{script}_right.py", 2, tmp_path, PYTHONHASHSEED="random")
    assert found.code == 0, found.output
    assert not found.sentences
    assert not found.questions
    assert "dropped" not in found.output and "is not recorded" not in found.output


@pytest.mark.parametrize("fault", FAULTS, ids=lambda each: f"{each.script}, {each.fault}")
def test_a_fault_is_told_by_line_call_and_remedy(fault: Fault, tmp_path: Path) -> None:
    script = fault.write(tmp_path)
    found = checked(script, 2, tmp_path)
    said = " ".join(found.questions if fault.asked else found.sentences)
    assert found.code == (0 if fault.asked else 1), found.output
    assert line_of(script, "a") in said, found.output
    for each in fault.told:
        assert each in said, found.output


@pytest.mark.parametrize("fault", ALONE, ids=lambda each: f"{each.script}, {each.fault}")
def test_ranks_that_train_alone_are_no_pass(fault: Fault, tmp_path: Path) -> None:
    found = checked(fault.write(tmp_path), 2, tmp_path)
    assert found.code == 1, found.output
    for each in fault.told:
        assert each in " ".join(found.sentences), found.output


@pytest.mark.parametrize("script", PACKAGES)
def test_a_right_one_is_proven(script: str, tmp_path: Path) -> None:
    output = tmp_path / "output"
    output.mkdir()
    found = check(SCRIPTS / f"{script}_right.py", 2, tmp_path, str(output), command="prove", PYTHONHASHSEED="random")
    assert found.code == 0, found.output
    assert not found.sentences
    assert "the same script on 1 rank, given the samples that all 2 read" in found.one_line, found.output


def test_trainers_factor_of_the_ranks_is_found(tmp_path: Path) -> None:
    """transformers 5.24 multiplies the loss by the ranks where a model takes `num_items_in_batch`, as its own sequence
    classification does, which ignores it and averages."""
    script = Fault("trainer", "", ((" average_tokens_across_devices=False,\n", "\n"),), ()).write(tmp_path)
    (tmp_path / "output").mkdir()
    found = check(script, 2, tmp_path, str(tmp_path / "output"), command="prove")
    assert found.code == 1, found.output
    assert "2 x those of 1 rank: summed over the 2 ranks and never divided" in " ".join(found.sentences), found.output


@pytest.mark.timeout(300)
@pytest.mark.parametrize("script", ["trainer", "lightning", "torchdata"])
def test_one_that_resumes_survives_a_kill(script: str) -> None:
    command = ["drill", "WORLD_SIZE=2", "--faults", "kill", str(SCRIPTS / f"{script}_resumes.py"), "output"]
    done = ended_warm("distlab", command, environ=clean(), timeout_s=280)
    assert done.returncode == 0, done.stdout
    assert re.search(r"kill, resume 2 +2 +\d+ +to the bit", done.stdout), done.stdout
