"""The scripts of docs/examples, beyond their output: they leave no process, and their formulas are correct."""

import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.docs.pages import TOP


def script(name: str) -> Any:
    return SimpleNamespace(**runpy.run_path(str(TOP / "docs" / "examples" / name)))


def test_eight_waiting_ranks_are_as_fast_as_three() -> None:
    eight = script("eight_ranks.py")
    assert eight.speedup(eight.SHARE, 1.0) == pytest.approx(3.0)
    assert eight.speedup(4 * eight.SHARE, 1.0) == pytest.approx(8 * 2.4 / 3.4)
    assert eight.speedup(eight.SHARE, 0.5) == pytest.approx(8 * 0.6 / 1.1)
    assert eight.speedup(eight.SHARE, 1.0, overlaps=True) == pytest.approx(4.8)
    assert [way.dtype for way in eight.WAYS].count(torch.bfloat16) == 1


def processes_in(folder: Path) -> list[str]:
    """Return the processes whose working folder is `folder`."""
    found = []
    for each in Path("/proc").iterdir():
        if each.name.isdigit():
            try:
                found += [each.name] * ((each / "cwd").readlink() == folder)
            except OSError:
                continue
    return found


def test_no_process_of_a_program_is_left(tmp_path: Path) -> None:
    """Tested with a program that starts itself repeatedly, and one that does not end."""
    bomb = script("fork_bomb.py")
    started, worked, _ = bomb.contained(bomb.PROGRAMS["without it, and without Python's own check"], tmp_path)
    assert bomb.MOST < started <= 2 * bomb.MOST + bomb.WORKERS and worked == 0
    assert processes_in(tmp_path) == []
    bomb.contained.__globals__["LIMIT_S"] = 1.0
    endless = "import subprocess, sys\nsubprocess.run([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
    (tmp_path / "endless").mkdir()
    assert bomb.contained(endless, tmp_path / "endless") == (0, 0, "it was ended after 1 s")
    assert processes_in(tmp_path / "endless") == []
