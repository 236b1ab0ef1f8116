"""The script that a shell reads: what bash completes by it, word by word."""

import shutil
import subprocess

import pytest

from distlab.cli.completion import SHELLS, script
from distlab.config.commands import offered
from distlab.config.settings import modes

ASK = """
COMP_WORDS=("$@")
COMP_CWORD=$(($# - 1))
_distlab 2>/dev/null
printf '%s\\n' "${COMPREPLY[@]}"
"""


def completed(*words: str) -> set[str]:
    """What the Tab key offers for the last word."""
    done = subprocess.run(
        ["bash", "-c", script("bash") + ASK, "bash", *words], capture_output=True, text=True, timeout=30, check=True
    )
    return set(done.stdout.split())


@pytest.mark.parametrize(
    ("words", "offers"),
    [
        ("distlab re", {"report", "reveal"}),
        ("distlab fi", set()),  # not among the commands for users
        ("distlab run f", {"fsdp"}),
        ("distlab run --", {"--quiet", "--json"}),
        ("./run LAB_STEP", {"LAB_STEPS="}),
        ("./run pp LAB_CHU", {"LAB_CHUNKS="}),  # of a mode
        ("distlab report --j", {"--junit"}),
        ("distlab clean --o", {"--older-than"}),
        ("distlab check pyproject.t", {"pyproject.toml"}),
        ("distlab completion z", {"zsh"}),
    ],
)
def test_bash_completes_a_word(words: str, offers: set[str]) -> None:
    assert completed(*words.split()) == offers


def test_the_first_word_is_a_command_or_a_mode() -> None:
    assert {*offered(), *modes(), "--version"} <= completed("distlab", "")


@pytest.mark.parametrize("shell", SHELLS)
def test_the_shell_reads_the_script(shell: str) -> None:
    if shutil.which(shell) is None:  # it is bash's, behind one line
        assert script(shell).partition("\n")[2] == script("bash")
        return
    done = subprocess.run([shell, "-c", script(shell)], capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stderr) == (0, "")
