"""The scripts in mine/ to try `distlab check` on: right ones have no finding, and each wrong one has its bug named."""

import re
from pathlib import Path

import pytest

from distlab.tools.check.judge.rank_state import DATA, HANG, MATCH, REPLICAS
from tests.tools.check.cases import Checked, assert_ended, check

MINE = Path(__file__).parents[3] / "mine"
RIGHT = ("accumulate", "ddp", "resume")


WRONG = {  # checks of which one must fail, and words of the finding
    "accumulate_unwrapped": ({REPLICAS}, "drifted apart", "layers.0.weight"),
    "ddp_same_data": ({DATA}, "train on the same data", "DistributedSampler"),
    "resume_rank_0": ({MATCH, HANG}, "barrier", "all_reduce"),
}


def checked_in(folder: Path, name: str, *words: str) -> Checked:
    """The script on two ranks; what it saves stays in `folder`."""
    saves = ("--checkpoint", str(folder / f"checkpoint{len(words)}.pt")) if name.startswith("resume") else ()
    return check(MINE / f"{name}.py", 2, folder, *saves, *words)


def epochs_of(checked: Checked) -> list[str]:
    """Rank 0's line of each epoch, of a script that ended well without a finding or question."""
    assert_ended(checked, 0)
    assert not checked.sentences and "question" not in checked.output
    return [line for line in checked.output.splitlines() if re.search(r"epoch \d: ", line)]


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_script_has_no_finding(name: str, tmp_path: Path) -> None:
    assert "epoch 1: " in epochs_of(checked_in(tmp_path, name))[-1]


def test_a_resumed_script_has_no_finding(tmp_path: Path) -> None:
    first, then = (epochs_of(checked_in(tmp_path, "resume", "--epochs", count)) for count in "12")
    assert ["epoch 0: " in line for line in (*first, *then)] == [True, False]
    assert then == epochs_of(checked_in(tmp_path, "resume"))[-1:]


@pytest.mark.parametrize("name", WRONG)
def test_the_bug_is_named(name: str, tmp_path: Path) -> None:
    checks, *says = WRONG[name]
    checked = checked_in(tmp_path, name)
    assert_ended(checked, 1, *says, f"{name}.py:")
    assert {finding["check"] for finding in checked.run["findings"]} <= checks, checked.output


def test_an_order_that_stays_is_a_question(tmp_path: Path) -> None:
    checked = checked_in(tmp_path, "sampler_epoch")
    assert_ended(checked, 0)
    assert not checked.sentences
    (question,) = checked.questions
    assert "set_epoch" in question


def test_all_scripts_of_ours_are_in_the_table() -> None:
    ignored = (MINE.parent / ".gitignore").read_text().splitlines()
    ours = {Path(line).stem for line in ignored if line.startswith("!/mine/") and line.endswith(".py")}
    to_prove = {"own"}  # tests/compose/test_own.py
    assert ours == {*RIGHT, "sampler_epoch", *WRONG} | to_prove
    assert all((MINE / f"{name}.py").is_file() for name in ours)
