"""A learner's actions: list tasks, show the next hint, judge an answer. In a notebook `%puzzle` lists the tasks,
`%puzzle 7` makes a cell to fill in, which begins with `%%puzzle 7` and is judged when it runs, and `%puzzle 7 --hint`
gives the next hint."""

import atexit
import shutil
import tempfile
from pathlib import Path
from typing import Any

from distlab.lab.report.units import human_bytes
from distlab.tools.puzzle.folder import Folder, Result, digest_of, stub_of, unfilled
from distlab.tools.puzzle.runner import Figures, Runner, Verdict
from distlab.tools.puzzle.task import Task, functions_of
from distlab.tools.puzzle.tasks import TASKS


def listed(folder: Folder) -> list[str]:
    """Return the list of tasks, the state of each, and how many passed."""
    states = {number: folder.state(task) for number, task in TASKS.items()}
    passed = sum(state == "passed" for state in states.values())
    rows = [f"{number:2}  {states[number]:<10}  {task.title}" for number, task in TASKS.items()]
    return [*rows, "", f"{passed} of {len(TASKS)} passed"]


def next_hint(folder: Folder, task: Task) -> str:
    """Return the next hint; after the last one the last one again."""
    result = folder.result(task)
    shown = min(result.num_hints, len(task.hints) - 1)
    result.num_hints = shown + 1
    folder.keep(task, result)
    return f"hint {shown + 1} of {len(task.hints)}: {task.hints[shown]}"


def judge_file(folder: Folder, task: Task, runner: Runner) -> Verdict | None:
    """Judge a file; return None if it is not filled in."""
    source = folder.file(task).read_text()
    if unfilled(source):
        return None
    verdict = unusable(folder.file(task), source, task) or runner.judge(task, folder.file(task))
    num_hints = folder.result(task).num_hints
    folder.keep(task, Result(verdict.passed, digest_of(folder.file(task)), verdict.reason, num_hints))
    return verdict


def unusable(file: Path, source: str, task: Task) -> Verdict | None:
    """Return the error of a file that cannot be run; None if it can."""
    try:
        missing = [name for name in task.functions if name not in functions_of(source)]
    except SyntaxError as error:
        return Verdict(False, 0, 0.0, [f"{file}:{error.lineno}: {error.msg}"])
    if missing:
        return Verdict(False, 0, 0.0, [f"{file} has no function {missing[0]}, which puzzle {task.number} needs"])
    return None


def verdict_lines(task: Task, verdict: Verdict | None, place: Path) -> list[str]:
    """Return the verdict's lines; `place` names the answer."""
    head = f"puzzle {task.number}, {task.title}"
    if verdict is None:
        return [f"{head}: to fill in, there is still `...` in {place}"]
    if not verdict.passed:
        ranks = f" with {ranks_text(verdict.world_size)}" if verdict.world_size else ""
        return [f"{head}: WRONG{ranks}", *(f"    {line}" for line in verdict.lines)]
    return [f"{head}: passed in {verdict.duration_s:.1f} s", *map(costs_text, verdict.figures)]


def costs_text(found: Figures) -> str:
    sent = f"{human_bytes(found.sent_bytes):>7} in {found.num_messages} messages and {found.num_calls} collectives"
    kept = f", keeps {human_bytes(found.peak_bytes)} of tensors" if found.peak_bytes else ""
    return f"    {ranks_text(found.world_size):<7}  the busiest sends {sent}{kept}"


def ranks_text(count: int) -> str:
    return f"{count} rank{'s' * (count > 1)}"


class Cells:
    """The cells of a notebook as answers: they are judged as files of a folder that ends with the kernel; the files'
    lines are the cell's. `shell` is IPython's."""

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self._folder = Folder(Path(tempfile.mkdtemp(prefix="distlab-puzzles-")))
        self._runner = Runner(self._folder.path)  # its ranks stay warm from cell to cell
        atexit.register(self.close)

    def puzzle(self, line: str, cell: str | None = None) -> None:
        """Run `%puzzle` or `%%puzzle` with its arguments and the cell below."""
        words = line.split()
        hint = words[1:] == ["--hint"] and cell is None
        task = TASKS.get(int(words[0])) if words and words[0].isdigit() else None
        if not words and cell is None:
            print("\n".join(listed(self._folder)))
        elif task is None or len(words) > 1 + hint:
            print(f"refused    {line.strip()!r} is no puzzle, allowed: 1 to {max(TASKS)}, and %puzzle 7 --hint")
        elif hint:
            print(next_hint(self._folder, task))
        elif cell is None:
            self._shell.set_next_input(f"%%puzzle {task.number}\n{stub_of(task)}")
        else:
            file = self._folder.file(task)
            file.write_text(f"\n{cell}")  # the line of the magic is the cell's first
            print("\n".join(verdict_lines(task, judge_file(self._folder, task, self._runner), Path("the cell"))))

    def close(self) -> None:
        """End the ranks and free their resources."""
        self._runner.close()
        shutil.rmtree(self._folder.path, ignore_errors=True)
        atexit.unregister(self.close)
