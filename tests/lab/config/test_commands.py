"""Arguments become a command and its settings, or an error that names what is allowed."""

import importlib.util
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from distlab.cli.run import main
from distlab.lab.config import ConfigError
from distlab.lab.config.commands import COMMANDS, Typed, parse_words
from distlab.lab.config.settings import GONE


@pytest.mark.parametrize(
    ("words", "typed"),
    [
        ("", Typed("run")),
        ("run", Typed("run")),
        ("run dp WORLD_SIZE=3", Typed("run", (), {"RUN_MODE": "dp", "WORLD_SIZE": "3"})),
        ("tp LAB_TEXT=a=b", Typed("run", (), {"RUN_MODE": "tp", "LAB_TEXT": "a=b"})),
        ("LAB_STEPS= RUN_MODE=pp", Typed("run", (), {"RUN_MODE": "pp", "LAB_STEPS": ""})),
        ("explain mine/mode.py", Typed("explain", (), {"RUN_MODE": "mine/mode.py"})),
        ("run LAB_OF_A_MODE=1", Typed("run", (), {"LAB_OF_A_MODE": "1"})),  # checked later, with all other settings
        ("report runs/a --junit b.xml", Typed("report", ["runs/a", "--junit", "b.xml"])),
        ("plan --help", Typed("plan", ["--help"])),
        ("--help", Typed("help")),
        ("help me", Typed("help")),
        ("explain dp -h", Typed("help", ["explain"])),
        ("--version", Typed("version")),
        ("run dp --quiet", Typed("run", (), {"RUN_MODE": "dp", "LAB_LOG": "quiet"})),
        ("dp --json LAB_STEPS=2", Typed("run", (), {"RUN_MODE": "dp", "LAB_STEPS": "2"}, as_json=True)),
    ],
)
def test_arguments_are_a_command_and_its_settings(words: str, typed: Typed) -> None:
    assert parse_words(words.split()) == typed


@pytest.mark.parametrize(
    ("words", "sentences"),
    [
        ("train.py", ["'train.py' is not a command or a mode (did you mean 'train'?), allowed: run, explain, "]),
        ("reprot runs/latest", ["'reprot' is not a command or a mode (did you mean 'report'?)"]),
        ("explain runs/absent.py STEPS=5", ["STEPS is not a variable"]),
        ("run explain", ["'explain' is not a mode, allowed: comm, "]),
        ("explain dp --json", ["'--json' is not a mode"]),
        ("ddp", ["'ddp' is not a command or a mode (did you mean 'dp'?), allowed: run, explain, "]),
        ("run STEPS=5 --fast", ["STEPS is not a variable of the lab (did you mean 'LAB_STEPS'?)", "'--fast' is not a mode"]),
        *((f"{name} dp STEPS=5 --help", [f"{name}: {GONE[name]}"]) for name in GONE if name.islower()),
        ("run dp tp", ["'tp' and RUN_MODE='dp' are two modes: a run has only one"]),
    ],
)  # fmt: skip
def test_an_unknown_argument_is_refused_with_what_is_allowed(words: str, sentences: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_words(words.split())
    for fault, sentence in zip(refused.value.faults, sentences, strict=True):
        assert fault.startswith(sentence)


def test_every_command_is_a_module() -> None:
    assert all(importlib.util.find_spec(command.module) for command in COMMANDS.values())


@pytest.mark.parametrize("command", [None, *(name for name in COMMANDS if name != "fit")])
def test_help_is_printed_and_starts_nothing(command: str | None, capsys: pytest.CaptureFixture[str]) -> None:
    code: int | str | None = None
    try:
        code = main([*([command] if command else []), "--help"])
    except SystemExit as exited:  # argparse's own
        code = exited.code
    assert code == 0
    printed = capsys.readouterr().out
    assert "usage: distlab" in printed
    assert "python -m" not in printed.replace("torchrun --nproc-per-node 4 -m distlab", "")


def test_internal_commands_are_not_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert "\n  fit " not in capsys.readouterr().out


def test_the_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert (
        capsys.readouterr().out
        == f"distlab {tomllib.loads(Path('pyproject.toml').read_text())['project']['version']}\n"
    )


def test_a_command_imported_before_runs_without_a_warning() -> None:
    """Tests import the module, and runpy would warn about that in the output of a CI."""
    program = "import sys, distlab.cli.engine, distlab.cli.run as run; sys.exit(run.main(['engine', 'kubernetes']))"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_refused_argument_is_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train.py"]) == 2
    assert capsys.readouterr().out.startswith(
        "refused    'train.py' is not a command or a mode (did you mean 'train'?)"
    )
