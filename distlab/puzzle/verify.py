"""Whether the tasks judge rightly: each reference passes, and each typical wrong answer is refused for its reason.

A wrong answer stands in wrong/ as functions whose names end in its number; what it leaves out is the reference's. Its
reason is a regular expression that the verdict has to match.
"""

import re
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from distlab.puzzle.rank import names_in
from distlab.puzzle.runner import Answer, Runner, Verdict
from distlab.puzzle.task import Task

HERE = Path(__file__).parent
ANSWERS, WRONG = HERE / "answers", HERE / "wrong"


class Case(NamedTuple):
    """An answer of the lab's: number 0 is the reference."""

    task: Task
    number: int
    reason: str = ""

    @property
    def name(self) -> str:
        return f"wrong answer {self.number}" if self.number else "reference"


def cases(tasks: Sequence[Task]) -> list[Case]:
    """All answers to these tasks."""
    found = []
    for task in tasks:
        found.append(Case(task, 0))
        found += [Case(task, number, reason) for number, reason in names_in(str(WRONG / task.file))["REFUSED"].items()]
    return found


class Verifier:
    """Judges them, in a folder where they are files of a learner's."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="distlab-answers-"))
        self._runner = Runner(self._folder)

    def judge(self, case: Case) -> Verdict:
        source = WRONG if case.number else ANSWERS
        file = self._folder / case.task.file
        shutil.copyfile(source / case.task.file, file)
        if not case.number:
            return self._runner.judge(case.task, Answer(file))
        reference = self._folder / f"reference_{case.task.file}"
        shutil.copyfile(ANSWERS / case.task.file, reference)
        return self._runner.judge(case.task, Answer(file, f"_{case.number}", str(reference)))

    def close(self) -> None:
        self._runner.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def is_as_expected(case: Case, verdict: Verdict) -> bool:
    if not case.number:
        return verdict.passed
    return not verdict.passed and re.search(case.reason, "\n".join(verdict.lines), re.DOTALL) is not None


def verify(tasks: Sequence[Task], say: Callable[[str], None]) -> bool:
    """Judge all answers to these tasks, and say each; returns whether all are as expected."""
    verifier, num_wrong, found = Verifier(), 0, cases(tasks)
    try:
        for case in found:
            verdict = verifier.judge(case)
            expected = is_as_expected(case, verdict)
            num_wrong += not expected
            outcome = "passed" if verdict.passed else f"refused: {verdict.reason}"
            say(f"{case.task.number:2}  {case.name:<15} {outcome}{'' if expected else '   NOT AS EXPECTED'}")
            if not expected:
                say("\n".join(f"    {line}" for line in [f"expected: {case.reason or 'passed'}", *verdict.lines[1:]]))
    finally:
        verifier.close()
    num_references = sum(not case.number for case in found)
    say(
        f"{num_references} references and {len(found) - num_references} wrong answers: "
        + (f"{num_wrong} not as expected" if num_wrong else "all as expected")
    )
    return not num_wrong
