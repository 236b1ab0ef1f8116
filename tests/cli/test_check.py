"""`distlab check` refuses invalid arguments before any rank starts, one sentence per fault, all at once."""

import os
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest

from distlab.cli.check import main
from tests.launched import clean

Check = Callable[..., tuple[int, str]]


@pytest.fixture
def check(capsys: pytest.CaptureFixture[str]) -> Check:
    """Return exit code and output of `distlab check WORDS`, which must not start a rank."""

    def checked(*words: str, **environ: str) -> tuple[int, str]:
        with mock.patch.dict(os.environ, clean(**environ), clear=True):
            code = main(words)
        return code, capsys.readouterr().out

    return checked


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text("print('here')\n")
    return str(path)


def test_help_names_its_variables_and_starts_nothing(check: Check) -> None:
    code, said = check("--help")
    assert code == 0
    for word in ("WORLD_SIZE", "LAB_HANG_AFTER_S", "LAB_CHECK_EVERY", "LAB_MESH", "LAB_REQUIREMENTS", "exit codes"):
        assert word in said


def test_a_missing_script_is_refused_with_the_nearest_one(check: Check, script: str) -> None:
    code, said = check(script.replace("train", "trian"))
    assert code == 2
    assert "does not exist (did you mean 'train.py'?)" in said


def test_no_script_is_refused(check: Check) -> None:
    assert check("WORLD_SIZE=2") == (
        2, "refused    no script given; usage: distlab check [NAME=VALUE ...] SCRIPT [ARGS ...]\n",
    )  # fmt: skip


def test_bad_syntax_is_refused_with_its_line(check: Check, tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("x = 1\nif x\n")
    code, said = check(str(tmp_path / "bad.py"))
    assert code == 2
    assert "bad.py' cannot be run, line 2: expected ':'" in said


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("LAB_HANG_AFTER=3", "did you mean 'LAB_HANG_AFTER_S'?"),
        ("LAB_HANG_AFTER_S=0", "LAB_HANG_AFTER_S='0'"),
        ("LAB_STEPS=5", "LAB_STEPS is a setting of the lab's own runs: check runs your script"),
        ("LAB_MESH=dp", "LAB_MESH='dp'"),
        ("WORLD_SIZE=9", "WORLD_SIZE"),
        ("LAB_REQUIREMENTS=requirements.txt", "works only in containers"),
    ],
)
def test_an_invalid_setting_is_refused(check: Check, setting: str, said: str, script: str) -> None:
    code, printed = check(setting, script)
    assert code == 2, printed
    assert said in printed
    name, _, value = setting.partition("=")
    assert check(script, **{name: value})[0] == 2  # in the environment too
