"""The scripts that mine/ shows to try `distlab check` on: of right ones nothing is said, of each other its bug."""

import re
from pathlib import Path

import pytest

from distlab.tools.check.judge.rank_state import DATA, HANG, MATCH, REPLICAS
from tests.tools.check.cases import Checked, assert_ended, check

MINE = Path(__file__).parents[3] / "mine"
RIGHT = ("accumulate", "ddp", "resume")


WRONG = {  # the checks one of which has to fail, and words that have to be said
    "accumulate_unwrapped": ({REPLICAS}, "drifted apart", "layers.0.weight"),
    "ddp_same_data": ({DATA}, "train on the same data", "DistributedSampler"),
    "resume_rank_0": ({MATCH, HANG}, "barrier", "all_reduce"),
}


def checked_in(folder: Path, name: str, *words: str) -> Checked:
    """The script on two ranks; what it saves stays in `folder`."""
    saves = ("--checkpoint", str(folder / f"checkpoint{len(words)}.pt")) if name.startswith("resume") else ()
    return check(MINE / f"{name}.py", 2, folder, *saves, *words)


def epochs_of(checked: Checked) -> list[str]:
    """What rank 0 said of each epoch of a script that ended well, and of which nothing else was said."""
    assert_ended(checked, 0)
    assert not checked.sentences and "question" not in checked.said
    return [line for line in checked.said.splitlines() if re.search(r"epoch \d: ", line)]


@pytest.mark.parametrize("name", RIGHT)
def test_nothing_is_said_of_a_right_one(name: str, tmp_path: Path) -> None:
    assert "epoch 1: " in epochs_of(checked_in(tmp_path, name))[-1]


def test_nothing_is_said_of_one_that_goes_on(tmp_path: Path) -> None:
    first, then = (epochs_of(checked_in(tmp_path, "resume", "--epochs", count)) for count in "12")
    assert ["epoch 0: " in line for line in (*first, *then)] == [True, False]
    assert then == epochs_of(checked_in(tmp_path, "resume"))[-1:]


@pytest.mark.parametrize("name", WRONG)
def test_the_bug_is_named(name: str, tmp_path: Path) -> None:
    checks, *says = WRONG[name]
    checked = checked_in(tmp_path, name)
    assert_ended(checked, 1, *says, f"{name}.py:")
    assert {finding["check"] for finding in checked.run["findings"]} <= checks, checked.said


def test_an_order_that_stays_is_asked_about(tmp_path: Path) -> None:
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
