"""The user's mode of mine/README.md, outside of experiments/: it is run, explained and proven, and its bug is caught."""

import json
import re
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from distlab.lab.rank.mode_loader import load
from tests.launched import clean, ended_warm

README = Path(__file__).parent.parent / "mine" / "README.md"
SMALL = {
    "LAB_MODEL": "mlp",
    "LAB_WIDTH": "16",
    "LAB_DEPTH": "2",
    "LAB_HEADS": "2",
    "LAB_SEQ": "8",
    "LAB_STEPS": "3",
    "WORLD_SIZE": "2",
}


def page_code() -> str:
    """Return the page's Python code, a complete mode."""
    (block,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    return str(block)


@pytest.fixture
def mode(tmp_path: Path) -> str:
    """Return the path of the mode, outside of the project."""
    (tmp_path / "mode.py").write_text(page_code())
    return str(tmp_path / "mode.py")


def run(folder: Path, *words: str, **variables: str) -> CompletedProcess[str]:
    environ = clean(LAB_RUNS_DIR=str(folder / "runs")) | SMALL | variables
    return ended_warm("workers", words, environ=environ, timeout_s=150)


def test_the_mode_has_at_most_40_lines(mode: str) -> None:
    assert len(page_code().splitlines()) <= 40
    assert load(mode).names == ("naive",)


@pytest.mark.timeout(180)
def test_the_mode_is_proven_timed_counted_and_drawn(tmp_path: Path, mode: str) -> None:
    done = run(tmp_path, RUN_MODE=mode)
    assert done.returncode == 0, done.stdout
    found = json.loads((tmp_path / "runs" / "latest" / "run.json").read_text())
    assert (found["verdict"], found["proven"], found["run_mode"]) == ("pass", True, mode)
    assert {check["name"] for check in found["checks"]} >= {"losses", "gradients", "weights"}
    (variant,) = found["variants"]
    assert variant["name"] == "naive"
    assert min(variant["called_bytes"] + variant["peak_bytes"] + variant["step_seconds"]) > 0
    page = (tmp_path / "runs" / "latest" / "report.html").read_text()
    assert "naive" in page
    assert (tmp_path / "runs" / "latest").resolve().name.startswith("mode-")


@pytest.mark.timeout(180)
def test_its_injected_bug_fails_its_check(tmp_path: Path, mode: str) -> None:
    done = run(tmp_path, RUN_MODE=mode, LAB_BUG="unsummed")
    assert done.returncode == 1, done.stdout
    output = " ".join(done.stdout.replace("rank 0 |", "").split())
    assert "naive gradients" in output
    assert "each rank trains on its own samples alone" in output


def test_the_mode_is_explained_and_refused(tmp_path: Path, mode: str) -> None:
    lesson = run(tmp_path, "explain", RUN_MODE=mode)
    assert "from outside of the lab" in lesson.stdout
    assert "each rank trains on its own samples alone" in lesson.stdout
    wrong = run(tmp_path, "explain", RUN_MODE=mode, LAB_BUG="unsumed", LAB_CHECKPOINT_EVERY="2")
    assert wrong.returncode == 2
    bug, saves = sorted(wrong.stdout.splitlines())
    assert bug.endswith("LAB_BUG='unsumed' is not a bug of mode (did you mean 'unsummed'?), allowed: unsummed")
    assert "mode keeps no state that it could save, modes with checkpoints:" in saves
