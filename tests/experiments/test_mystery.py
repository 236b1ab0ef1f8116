"""LAB_BUG=mystery:7 in every mode that has bugs: no file of the run names the bug, and `distlab reveal` does."""

import re
import shutil
from pathlib import Path

import pytest

from distlab.cli import report, reveal
from distlab.config import Config
from distlab.config.settings import modes
from distlab.rank.injected_bug import bug_of
from distlab.rank.mode_loader import load
from distlab.report.log import verdict_lines
from tests.labs import TINY, Runs, failed
from tests.mistakes import WORLD_SIZE, whole

WITH_BUGS = [run_mode for run_mode in modes() if load(run_mode).mistakes]
CLIPPED = {"precision": {"LAB_CLIP": "0.05"}}


def told(text: str, run_mode: str) -> list[str]:
    """The bugs of a mode that a text names, whichever of them was injected."""
    return [bug for bug in load(run_mode).mistakes if re.search(rf"\b{bug}\b", text)]


@pytest.mark.parametrize("run_mode", WITH_BUGS)
def test_no_file_of_a_mystery_names_a_bug_and_reveal_does(
    runs: Runs, run_mode: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = whole(run_mode) | CLIPPED.get(run_mode, {}) | {"LAB_BUG": "mystery:7"}
    ran = runs(WORLD_SIZE, **settings)
    config, mode = Config.read(TINY | {"WORLD_SIZE": str(WORLD_SIZE)} | settings), load(run_mode)
    drawn = bug_of(config, mode)
    assert drawn is not None
    assert mode.mistakes[drawn].check in failed(ran.judged)
    folder = shutil.copytree(ran.folder, tmp_path / "run")
    report.main([str(folder)])  # which writes run.json and report.html
    files = {file.name: file.read_bytes().decode("utf-8", "replace") for file in folder.rglob("*") if file.is_file()}
    assert {"run.json", "report.html", "rank0.jsonl", "rank0.log"} <= set(files)
    files["the log's end"] = "\n".join(verdict_lines(ran.judged, ran.records, None))
    assert {name: told(text, run_mode) for name, text in files.items() if told(text, run_mode)} == {}
    assert mode.mistakes[drawn].what not in "".join(files.values())
    capsys.readouterr()
    assert reveal.main([str(folder)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"LAB_BUG=mystery:7 was {drawn}: " in said
    assert f"{mode.mistakes[drawn].check} is meant to catch it" in said
    assert "not caught" not in said


def test_a_bug_that_is_named_is_found_in_the_files(runs: Runs) -> None:
    """The search that the test above rests on."""
    bug = next(iter(load("tp").mistakes))
    ran = runs(WORLD_SIZE, **whole("tp"), LAB_BUG=bug)
    assert bug in told((ran.folder / "rank0.jsonl").read_text(), "tp")
