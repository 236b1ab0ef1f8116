"""The learner's folder: one file per task, which is written only once, and the latest result of each."""

import ast
import hashlib
import json
import textwrap
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from distlab.lab.report.reading import from_json, read_regular, write_atomically
from distlab.tools.puzzle.task import Task

WIDTH = 116
RESULTS = ".results.json"
MOST_BYTES = 1 << 20  # of the results
HEAD = '''\
"""Puzzle {number}: {title}.

{idea}

{allowed}
{limits}
Judged with 1, 2, 3 and 4 ranks: results must equal one process's to 1e-12 in float64.

    distlab puzzle {number}           runs this file
    distlab puzzle {number} --hint    the next of {hints} hints
"""

{imports}


'''
IMPORTS = "import torch\nimport torch.distributed as dist\nfrom torch import Tensor"


@dataclass
class Result:
    """A task's result: whether it passed, of which content, the reason if not, and the hints given."""

    passed: bool | None = None  # None: it was not run
    digest: str = ""
    reason: str = ""
    num_hints: int = 0


class Folder:
    """A learner's folder `puzzles/`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def file(self, task: Task) -> Path:
        return self.path / task.file

    def write(self, task: Task) -> bool:
        """Write the file to fill in, unless there is one; returns whether it was written."""
        self.path.mkdir(parents=True, exist_ok=True)
        try:
            with self.file(task).open("x") as file:
                file.write(stub_of(task))
        except FileExistsError:
            return False
        return True

    def state(self, task: Task) -> str:
        """Return the task's state in a word or two."""
        if not self.file(task).exists():
            return "-"
        if unfilled(self.file(task).read_text()):
            return "to fill in"
        result = self.result(task)
        if result.passed is None or result.digest != digest_of(self.file(task)):
            return "not run"
        return "passed" if result.passed else "wrong"

    def result(self, task: Task) -> Result:
        found = self._results().get(str(task.number), {})
        return Result(**{name: found[name] for name in asdict(Result()) if name in found})

    def keep(self, task: Task, result: Result) -> None:
        kept = self._results() | {str(task.number): asdict(result)}
        self.path.mkdir(parents=True, exist_ok=True)
        write_atomically(self.path / RESULTS, [json.dumps(kept, indent=1)])

    def _results(self) -> dict[str, dict[str, Any]]:
        try:
            found = from_json(read_regular(self.path / RESULTS, MOST_BYTES))
        except (OSError, ValueError):  # none yet, or edited by hand
            return {}
        return found if isinstance(found, dict) else {}


def stub_of(task: Task) -> str:
    """Return the content of the learner's new file."""
    allowed = " and ".join(sorted(task.allowed)) or "nothing"
    if task.allowed == {"send", "recv"}:
        allowed = "send and receive (send, recv, isend, irecv, batch_isend_irecv)"
    callables = "from collections.abc import Callable\n\n" if "Callable" in task.stub else ""
    allowed = f"Allowed: torch, and of torch.distributed {allowed}. Any other call is refused."
    text = HEAD.format(
        number=task.number,
        title=task.title,
        idea=textwrap.fill(task.idea, WIDTH),
        allowed=textwrap.fill(allowed, WIDTH),
        limits=textwrap.fill(f"Bound: {task.limits}.", WIDTH),
        hints=len(task.hints),
        imports=callables + IMPORTS,
    )
    return text + task.stub


def unfilled(source: str) -> list[str]:
    """Return the functions whose body is still `...`; none if the source is not Python."""
    try:
        functions = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
    except SyntaxError:
        return []
    return [each.name for each in functions if is_ellipsis(each.body[-1])]


def is_ellipsis(statement: ast.stmt) -> bool:
    return (
        isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant) and statement.value.value is ...
    )


def digest_of(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
