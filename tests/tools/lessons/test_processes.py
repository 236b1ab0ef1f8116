"""The fork bomb and the zombie: what is shown is what happens, and nothing of it is left."""

import os
from pathlib import Path

import pytest

from distlab.tools.lessons import processes


def marked(folder: Path) -> list[str]:
    """The processes that stand in a folder."""
    found = []
    for each in Path("/proc").iterdir():
        if each.name.isdigit():
            try:
                found += [each.name] * (os.readlink(each / "cwd") == str(folder))
            except OSError:
                continue
    return found


@pytest.mark.parametrize(
    ("name", "started", "worked"),
    [("with the guard", range(3, 4), 2), ("without it", range(3, 4), 0)],
)
def test_the_guard_decides_whether_workers_work(name: str, started: range, worked: int, tmp_path: Path) -> None:
    found, did, errors = processes.contained(processes.PROGRAMS[name], tmp_path)
    assert (found in started, did) == (True, worked)
    assert ("RuntimeError" in errors) == (worked == 0)
    assert marked(tmp_path) == []


def test_without_pythons_check_it_explodes_and_is_contained(tmp_path: Path) -> None:
    name = "without it, and without Python's own check"
    found, _, _ = processes.contained(processes.PROGRAMS[name], tmp_path)
    assert processes.MOST < found <= 2 * processes.MOST + processes.WORKERS
    assert marked(tmp_path) == []


def test_a_child_that_nobody_waited_for_is_a_zombie() -> None:
    said = "\n".join(processes.zombie())
    assert "before join: a zombie (state Z)" in said
    assert "after join: gone" in said


def test_a_program_that_does_not_end_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "LIMIT_S", 1.0)
    endless = "import subprocess, sys\nsubprocess.run([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
    assert processes.ended(endless, tmp_path) == ("", "it was ended after 1 s")
    assert marked(tmp_path) == []
