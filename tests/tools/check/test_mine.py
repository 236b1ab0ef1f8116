"""The scripts that mine/ shows to try `distlab check` on: of right ones nothing is said, of each other its bug."""

from pathlib import Path
from typing import NamedTuple

import pytest

from distlab.tools.check.judge.rank_state import DATA, HANG, MATCH, REPLICAS
from tests.tools.check.cases import Checked, check

MINE = Path(__file__).parents[3] / "mine"
RIGHT = ("accumulate", "ddp", "resume")


class Wrong(NamedTuple):
    """A script with a bug: the checks one of which has to fail, and words that have to be said of it."""

    name: str
    checks: tuple[str, ...]
    says: tuple[str, ...]


WRONG = (
    Wrong("accumulate_unwrapped", (REPLICAS,), ("drifted apart", "layers.0.weight")),
    Wrong("ddp_same_data", (DATA,), ("train on the same data", "DistributedSampler")),
    Wrong("resume_rank_0", (MATCH, HANG), ("barrier", "all_reduce")),
)


def checked_in(folder: Path, name: str) -> Checked:
    """The script on two ranks; what it saves stays in `folder`."""
    words = ("--checkpoint", str(folder / "checkpoint.pt")) if name.startswith("resume") else ()
    return check(MINE / f"{name}.py", 2, folder, *words)


def said_nothing(checked: Checked) -> bool:
    """Whether there is neither a finding nor a question."""
    return checked.code == 0 and not checked.sentences and "question" not in checked.said


@pytest.mark.parametrize("name", RIGHT)
def test_nothing_is_said_of_a_right_one(name: str, tmp_path: Path) -> None:
    checked = checked_in(tmp_path, name)
    assert said_nothing(checked), checked.said
    assert "epoch 1: " in checked.said


def test_nothing_is_said_of_one_that_goes_on(tmp_path: Path) -> None:
    words = ("--checkpoint", str(tmp_path / "checkpoint.pt"), "--epochs")
    first = check(MINE / "resume.py", 2, tmp_path, *words, "1")
    assert said_nothing(first), first.said
    assert "epoch 0: " in first.said and "epoch 1: " not in first.said
    then = check(MINE / "resume.py", 2, tmp_path, *words, "2")
    assert said_nothing(then), then.said
    assert "epoch 0: " not in then.said and "epoch 1: " in then.said
    straight = check(MINE / "resume.py", 2, tmp_path, "--checkpoint", str(tmp_path / "straight.pt"))
    assert loss(then) == loss(straight)


def loss(checked: Checked) -> str:
    """What rank 0 said of the last epoch."""
    (line,) = [line for line in checked.said.splitlines() if "epoch 1: " in line]
    return line


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.name)
def test_the_bug_is_named(wrong: Wrong, tmp_path: Path) -> None:
    checked = checked_in(tmp_path, wrong.name)
    assert checked.code == 1, checked.said
    findings = checked.run["findings"]
    assert {finding["check"] for finding in findings} <= set(wrong.checks), checked.said
    assert [word for word in wrong.says if word not in "\n".join(checked.sentences)] == []
    assert f"{wrong.name}.py:" in "\n".join(checked.sentences)


def test_an_order_that_stays_is_asked_about(tmp_path: Path) -> None:
    checked = checked_in(tmp_path, "sampler_epoch")
    assert checked.code == 0, checked.said
    assert not checked.sentences
    (question,) = checked.questions
    assert "set_epoch" in question


def test_all_scripts_of_ours_are_in_the_table() -> None:
    ignored = (MINE.parent / ".gitignore").read_text().splitlines()
    ours = {Path(line).stem for line in ignored if line.startswith("!/mine/") and line.endswith(".py")}
    to_prove = {"own"}  # tests/compose/test_own.py
    assert ours == {*RIGHT, "sampler_epoch", *(wrong.name for wrong in WRONG)} | to_prove
    assert all((MINE / f"{name}.py").is_file() for name in ours)
