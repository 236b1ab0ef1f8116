"""Each mode's lesson.py: short, imports only torch, correct under torchrun, and wrong with each bug that it can have."""

import ast
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from distlab.cli.explain import diff
from distlab.lab.config.settings import lesson_file, modes
from distlab.lab.rank.mode_loader import load
from tests.labs import failed, run_experiment
from tests.mistakes import correct_settings
from tests.warm_ranks import Ranks

MOST_LINES = {"mesh": 120, "elastic": 120}
LEAST_RANKS = {"mesh": 4, "elastic": 3}
TOLERANCE = 1e-12
LESSONS = modes()
DIFFS = [(name, bug) for name in LESSONS for bug in load(name).in_lesson]

pytestmark = pytest.mark.timeout(120)


def source(mode: str) -> str:
    return (lesson_file(mode).parent / "lesson.py").read_text()


@pytest.mark.parametrize("mode", LESSONS)
def test_a_lesson_is_short_and_imports_only_torch(mode: str) -> None:
    assert len(source(mode).splitlines()) <= MOST_LINES.get(mode, 80)
    named = [node for node in ast.walk(ast.parse(source(mode))) if isinstance(node, ast.Import | ast.ImportFrom)]
    tops = {
        name.partition(".")[0]
        for node in named
        for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [each.name for each in node.names])
    }
    assert tops <= {"torch", *sys.stdlib_module_names}


@pytest.mark.parametrize("mode", LESSONS)
def test_a_copied_lesson_runs_under_torchrun(mode: str, tmp_path: Path) -> None:
    copy, ranks = tmp_path / "lesson.py", LEAST_RANKS.get(mode, 2)
    copy.write_text(source(mode))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), copy.name]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    assert run.returncode == 0, run.stderr
    errors = [float(number) for number in re.findall(r"by (\S+) at most", run.stdout)]
    assert len(errors) == ranks, run.stdout
    assert max(errors) <= TOLERANCE


@pytest.mark.parametrize("mode", LESSONS)
def test_a_lesson_passes_as_the_variant_plain(ranks: Ranks, mode: str, tmp_path: Path) -> None:
    run, _ = run_experiment(ranks, LEAST_RANKS.get(mode, 2), tmp_path, **correct_settings(mode), LAB_VARIANT="plain")
    assert failed(run) == set()


def run_demo(group: dist.ProcessGroup, text: str) -> float:
    """Return the error that the lesson's own demo finds."""
    names = {"__name__": "lesson"}
    exec(compile(text, "lesson.py", "exec"), names)
    error: float = names["demo"](group)  # type: ignore[operator]
    return error


@pytest.mark.parametrize(("mode", "bug"), DIFFS)
def test_a_bug_of_one_line_breaks_the_lesson(ranks: Ranks, mode: str, bug: str) -> None:
    right, wrong = load(mode).in_lesson[bug]
    assert source(mode).count(right) == 1
    num_ranks = max(3, LEAST_RANKS.get(mode, 0))
    assert max(ranks(num_ranks, run_demo, source(mode))) <= TOLERANCE
    error = max(ranks(num_ranks, run_demo, source(mode).replace(right, wrong)))
    assert error > 1e-9 or math.isnan(error)
    assert bug in load(mode).mistakes
    assert len(diff(source(mode), right, wrong)) == len(["", "In lesson.py:", "", "-", "+"])
