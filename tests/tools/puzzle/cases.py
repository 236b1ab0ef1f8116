"""The answers that test the judge: a reference of each task, which passes, and three typical wrong answers.

A wrong answer in wrong/ is a set of functions whose names end in its number; the others are the reference's. Its reason
is a regular expression that the verdict must match.
"""

import re
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from distlab.tools import puzzle
from distlab.tools.puzzle.rank import names_in
from distlab.tools.puzzle.runner import Runner, Verdict
from distlab.tools.puzzle.task import Task

ANSWERS, WRONG = Path(puzzle.__file__).parent / "answers", Path(__file__).parent / "wrong"


class Case(NamedTuple):
    """An answer; number 0 is the reference."""

    task: Task
    number: int
    reason: str = ""


def cases(tasks: Sequence[Task]) -> list[Case]:
    """Return all answers to these tasks."""
    found = []
    for task in tasks:
        found.append(Case(task, 0))
        found += [Case(task, number, reason) for number, reason in names_in(str(WRONG / task.file))["REFUSED"].items()]
    return found


class Verifier:
    """Judges answers, as files in a learner's folder."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="distlab-answers-"))
        self._runner = Runner(self._folder)

    def judge(self, case: Case) -> Verdict:
        source = (ANSWERS / case.task.file).read_text()
        if case.number:
            wrong, suffix = WRONG / case.task.file, f"_{case.number}"
            own = [name for name in names_in(str(wrong)) if name.endswith(suffix)]
            renamed = [f"{name.removesuffix(suffix)} = {name}" for name in own]
            source = "\n".join([source, wrong.read_text(), *renamed])
        file = self._folder / case.task.file
        file.write_text(source)
        return self._runner.judge(case.task, file)

    def close(self) -> None:
        self._runner.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def is_as_expected(case: Case, verdict: Verdict) -> bool:
    if not case.number:
        return verdict.passed
    return not verdict.passed and re.search(case.reason, "\n".join(verdict.lines), re.DOTALL) is not None
