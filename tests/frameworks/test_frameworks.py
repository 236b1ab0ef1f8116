"""accelerate, transformers' Trainer and Lightning under `distlab check`, `prove` and `drill`, torchdata's loader under the
last one: `make frameworks`, which installs them.

A right script of each ends without a finding or a question. For six classic faults each the report names the user's
line, the framework's call and the remedy in its terms. docs/check.md has the table.
"""

import re
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.frameworks.faults import ALONE, FAULTS, PACKAGES, SCRIPTS, Fault, versions
from tests.launched import clean, ended_warm
from tests.tools.check.cases import Checked, check, line_of


def checked(script: Path, world_size: int, folder: Path, **environ: str) -> Checked:
    """Check a script as a user does: without a hash seed, with one interpreter per rank."""
    output = folder / "output"
    output.mkdir()
    return check(script, world_size, folder, str(output), LAB_HANG_AFTER_S="2", **environ)


@pytest.mark.parametrize("script", PACKAGES)
def test_the_versions_are_those_of_the_table(script: str) -> None:
    assert f"{PACKAGES[script]} {version(PACKAGES[script])}" == versions()[script]


@pytest.mark.parametrize("script", PACKAGES)
def test_a_right_script_has_no_finding(script: str, tmp_path: Path) -> None:
    found = checked(SCRIPTS / f"{script}_right.py", 2, tmp_path, PYTHONHASHSEED="random")
    assert found.code == 0, found.said
    assert not found.sentences
    assert not found.questions
    assert "dropped" not in found.said and "is not recorded" not in found.said


@pytest.mark.parametrize("fault", FAULTS, ids=lambda each: f"{each.script}, {each.fault}")
def test_a_fault_is_named_with_line_call_and_remedy(fault: Fault, tmp_path: Path) -> None:
    script = fault.write(tmp_path)
    found = checked(script, 2, tmp_path)
    said = " ".join(found.questions if fault.is_question else found.sentences)
    assert found.code == (0 if fault.is_question else 1), found.said
    assert line_of(script, "a") in said, found.said
    for each in fault.parts:
        assert each in said, found.said


@pytest.mark.parametrize("fault", ALONE, ids=lambda each: f"{each.script}, {each.fault}")
def test_ranks_that_train_alone_do_not_pass(fault: Fault, tmp_path: Path) -> None:
    found = checked(fault.write(tmp_path), 2, tmp_path)
    assert found.code == 1, found.said
    for each in fault.parts:
        assert each in " ".join(found.sentences), found.said


@pytest.mark.parametrize("script", PACKAGES)
def test_a_right_script_is_proven(script: str, tmp_path: Path) -> None:
    output = tmp_path / "output"
    output.mkdir()
    found = check(SCRIPTS / f"{script}_right.py", 2, tmp_path, str(output), command="prove", PYTHONHASHSEED="random")
    assert found.code == 0, found.said
    assert not found.sentences
    assert "the same script on 1 rank, with the samples that all 2 ranks read" in found.told, found.said


def test_trainers_factor_of_the_ranks_is_found(tmp_path: Path) -> None:
    """transformers 5.24 multiplies the loss by the number of ranks if a model accepts `num_items_in_batch`. Its own
    sequence classification does, but ignores it and averages."""
    script = Fault("trainer", "", ((" average_tokens_across_devices=False,\n", "\n"),), ()).write(tmp_path)
    (tmp_path / "output").mkdir()
    found = check(script, 2, tmp_path, str(tmp_path / "output"), command="prove")
    assert found.code == 1, found.said
    assert "2 x those of 1 rank: summed over the 2 ranks and never divided" in " ".join(found.sentences), found.said


@pytest.mark.timeout(300)
@pytest.mark.parametrize("script", ["trainer", "lightning", "torchdata"])
def test_a_script_that_resumes_survives_a_kill(script: str) -> None:
    command = ["drill", "WORLD_SIZE=2", "--faults", "kill", str(SCRIPTS / f"{script}_resumes.py"), "output"]
    done = ended_warm("distlab", command, environ=clean(), timeout_s=280)
    assert done.returncode == 0, done.stdout
    assert re.search(r"kill, resume 2 +2 +\d+ +to the bit", done.stdout), done.stdout
