"""`distlab puzzle`: fill-in tasks of distributed training, judged on real ranks.

Exit codes: 0 passed, or nothing was judged; 1 wrong, or not filled in; 2 an invalid argument.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

from distlab.cli import prints_refusals
from distlab.lab.config import Refusal
from distlab.lab.report.reading import write_bytes_atomically
from distlab.lab.report.table import on_terminal
from distlab.tools.puzzle.folder import Folder
from distlab.tools.puzzle.learner import judge_file, listed, next_hint, verdict_lines
from distlab.tools.puzzle.runner import Runner, Verdict
from distlab.tools.puzzle.task import Task
from distlab.tools.puzzle.tasks import TASKS

FOLDER = Path("puzzles")


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = argparse.ArgumentParser(
        "distlab puzzle",
        description=f"Without arguments it lists the {len(TASKS)} tasks. With a NUMBER it writes "
        "puzzles/NUMBER_name.py; once you have filled it in, it runs it with 1, 2, 3 and 4 ranks.",
        epilog="exit codes: 0 passed, 1 wrong, 2 an invalid argument",
    )
    made.add_argument("number", nargs="?", type=int, metavar="NUMBER", help=f"the number of a task, 1 to {len(TASKS)}")
    made.add_argument("--hint", action="store_true", help="print the next hint for the task")
    made.add_argument("--all", action="store_true", help="run all files in puzzles/ that are filled in")
    made.add_argument("--junit", type=Path, metavar="FILE", help="also write the verdicts as JUnit XML")
    return made


@prints_refusals
def main(words: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    typed = parser().parse_args(words)
    if fault := refused(typed):
        raise Refusal(fault)
    return done(typed)


def done(typed: argparse.Namespace) -> int:
    """Run the parsed command; raises ConfigError if no ranks can be started."""
    folder = Folder(FOLDER)
    chosen = [TASKS[typed.number]] if typed.number else list(TASKS.values())
    if typed.all:
        return judge_all(folder, [task for task in chosen if folder.state(task) != "-"], typed.junit)
    if typed.number is None:
        *rows, passed = listed(folder)
        print("\n".join([*on_terminal(rows), f"{passed}; `distlab puzzle 1` writes {FOLDER / TASKS[1].file}"]))
        return 0
    if typed.hint:
        print("\n".join(on_terminal(next_hint(folder, chosen[0]).splitlines())))
        return 0
    return work_on(folder, chosen[0], typed.junit)


def refused(typed: argparse.Namespace) -> str:
    """Return why the arguments are invalid; empty if they are valid."""
    if typed.number is not None and typed.number not in TASKS:
        return f"there is no puzzle {typed.number}, allowed: 1 to {max(TASKS)}"
    if typed.number is None and typed.hint:
        return "--hint needs the number of a puzzle: distlab puzzle 7 --hint"
    if typed.number is not None and typed.all:
        return f"--all judges all puzzles, and {typed.number} names one: give only one of the two"
    if typed.junit is not None and (typed.hint or (typed.number is None and not typed.all)):
        return "--junit needs answers to judge: distlab puzzle --all --junit FILE, or 7 in place of --all"
    return ""


def work_on(folder: Folder, task: Task, junit: Path | None) -> int:
    """Write the file of a task, or judge it."""
    file = folder.file(task)
    if folder.write(task):
        print(f"wrote {file}: {task.title}")
        print(f"fill in {' and '.join(task.functions)}, then: distlab puzzle {task.number}")
        return 0
    return judge_all(folder, [task], junit)


def judge_all(folder: Folder, tasks: Sequence[Task], junit: Path | None) -> int:
    """Judge the files of these tasks, with a summary if there are several."""
    runner, verdicts = Runner(folder.path), {}
    try:
        for task in tasks:
            verdicts[task] = verdict = judge_file(folder, task, runner)
            print("\n".join(on_terminal(verdict_lines(task, verdict, folder.file(task)))), flush=True)
    finally:
        runner.close()
    passed = sum(verdict is not None and verdict.passed for verdict in verdicts.values())
    if len(tasks) != 1:
        print(f"{passed} of {len(tasks)} files in {folder.path}/ passed, of {len(TASKS)} puzzles")
    if junit is not None:
        write_junit(junit, verdicts)
    judged = [verdict for verdict in verdicts.values() if verdict is not None]
    return 0 if all(verdict.passed for verdict in judged) and (judged or len(tasks) != 1) else 1


def write_junit(file: Path, verdicts: dict[Task, Verdict | None]) -> None:
    """Write a test case per task; unfilled ones are skipped."""
    failed = sum(verdict is not None and not verdict.passed for verdict in verdicts.values())
    skipped = sum(verdict is None for verdict in verdicts.values())
    counts = {"tests": len(verdicts), "failures": failed, "errors": 0, "skipped": skipped}
    suite = ElementTree.Element(
        "testsuite", {"name": "distlab puzzle"} | {name: str(count) for name, count in counts.items()}
    )
    for task, verdict in verdicts.items():
        seconds = f"{verdict.duration_s:.3f}" if verdict else "0"
        name = task.file.removesuffix(".py")
        case = ElementTree.SubElement(suite, "testcase", classname="distlab.tools.puzzle", name=name, time=seconds)
        if verdict is None:
            ElementTree.SubElement(case, "skipped", message="not filled in")
        elif not verdict.passed:
            ElementTree.SubElement(case, "failure", message=verdict.reason).text = "\n".join(verdict.lines)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_bytes_atomically(file, ElementTree.tostring(suite, encoding="utf-8", xml_declaration=True))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
