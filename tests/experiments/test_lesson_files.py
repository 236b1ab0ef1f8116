"""Each mode's lesson.py: small, of torch alone, right by itself under torchrun, and wrong with each bug that it can show."""

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
from tests.mistakes import whole
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
    off = [float(number) for number in re.findall(r"by (\S+) at most", run.stdout)]
    assert len(off) == ranks, run.stdout
    assert max(off) <= TOLERANCE


@pytest.mark.parametrize("mode", LESSONS)
def test_a_lesson_passes_as_the_variant_plain(ranks: Ranks, mode: str, tmp_path: Path) -> None:
    run, _ = run_experiment(ranks, LEAST_RANKS.get(mode, 2), tmp_path, **whole(mode), LAB_VARIANT="plain")
    assert failed(run) == set()


def demo(group: dist.ProcessGroup, text: str) -> float:
    """What the lesson's own demo finds."""
    names = {"__name__": "lesson"}
    exec(compile(text, "lesson.py", "exec"), names)
    off: float = names["demo"](group)  # type: ignore[operator]
    return off


@pytest.mark.parametrize(("mode", "bug"), DIFFS)
def test_a_bug_of_one_line_breaks_the_lesson(ranks: Ranks, mode: str, bug: str) -> None:
    right, wrong = load(mode).in_lesson[bug]
    assert source(mode).count(right) == 1
    num_ranks = max(3, LEAST_RANKS.get(mode, 0))
    assert max(ranks(num_ranks, demo, source(mode))) <= TOLERANCE
    off = max(ranks(num_ranks, demo, source(mode).replace(right, wrong)))
    assert off > 1e-9 or math.isnan(off)
    assert bug in load(mode).mistakes
    assert len(diff(source(mode), right, wrong)) == len(["", "In lesson.py:", "", "-", "+"])
