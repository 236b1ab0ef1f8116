"""docs/practice.md and docs/lessons.md: each command shows what the page says, and the minutes add up.

Times are not measured, because that would test the load of this machine. Instead, a command that names 20 s has a limit
on the number of layers in all of its timed steps.
"""

import json
import re
import shlex
from pathlib import Path

import pytest

from distlab.lab.config.settings import modes
from distlab.tools.puzzle.tasks import TASKS
from tests.docs.pages import fenced, page
from tests.documents import spans, tables
from tests.launched import clean, ended_warm
from tests.test_coverage_runs import EXPECTED

QUICK = {"LAB_WIDTH": "32", "LAB_DEPTH": "4", "LAB_STEPS": "5"}  # as the Makefile has it
LAYERS_PER_S = 40  # of all ranks on two cores, including start and proof; the steps of the page run 10 to 16
STEP = re.compile(r"^### Step (\d): .*?(?=^##)", re.DOTALL | re.MULTILINE)
# The text that each step of the page asks the reader to find in the report or the log.
EXPECTED_TEXT = {
    "1": r"A ring all_reduce",
    "2": r"flat +[\d.]+e-1\d +.*passed",
    "3": r"per_parameter",
    "4": r"zero3",
    "5": r"1f1b",
    "6": r"FAILED +bucketed losses: differs by",
}
STEPS = {step[1]: step[0] for step in STEP.finditer(page("practice"))}


def settings(line: str) -> dict[str, str]:
    """Return the variables of a line that ends in `make run` or `make quick`."""
    words = shlex.split(line, comments=True)
    named = dict(word.split("=", 1) for word in words if "=" in word)
    return (QUICK if words[-1] == "quick" else {}) | named


def run_line(step: str) -> str:
    (line,) = [line for line in fenced(STEPS[step], "sh") if " make " in f" {line}"]
    return line


@pytest.mark.timeout(260)
@pytest.mark.parametrize("step", STEPS)
def test_the_command_of_a_step_shows_its_topic(step: str, tmp_path: Path) -> None:
    line = run_line(step)
    variables = settings(line) | {"LAB_RUNS_DIR": str(tmp_path), "LAB_RUN_ID": "shown", "LAB_LOG": "full"}
    done = ended_warm("workers", environ=clean(**variables), timeout_s=200)
    assert done.returncode == ("exit code 1" in line), done.stdout
    report = (tmp_path / "shown" / "report.html").read_text()
    assert re.search(EXPECTED_TEXT[step], done.stdout + report)
    run = json.loads((tmp_path / "shown" / "run.json").read_text())
    timed = sum(len(each["step_seconds"]) for each in run["variants"])
    layers = timed * int(run["config"]["LAB_DEPTH"]) * int(run["world_size"])
    (stated_s,) = re.findall(r"# (\d+) s", line)
    assert layers <= LAYERS_PER_S * int(stated_s), "too many steps for the time that the page names"


def test_the_class_has_six_steps_in_90_minutes() -> None:
    assert list(STEPS) == list(EXPECTED_TEXT)
    rows = [row for heading, row in tables(page("practice")) if heading == "A class of 90 minutes"]
    assert sum(int(row[1]) for row in rows) == 90
    for step in STEPS.values():
        questions, _, answers = step.partition("<details><summary>Answers</summary>")
        assert re.findall(r"^(\d)\. ", questions, re.MULTILINE) == ["1", "2"]
        assert re.findall(r"^(\d)\. ", answers.partition("</details>")[0], re.MULTILINE) == ["1", "2"]


def test_the_path_goes_through_every_mode_once() -> None:
    rows = [row for heading, row in tables(page("practice")) if heading == "The path through all modes"]
    assert sorted(row[0].strip("`") for row in rows) == sorted(modes())
    hours, minutes = divmod(sum(int(row[1]) for row in rows), 60)
    assert (hours, minutes) == (5, 10)
    assert "five hours and ten minutes" in page("practice")


def test_each_command_of_the_lessons_page_is_tested() -> None:
    """tests/test_coverage_runs.py runs them; another number of ranks counts as the same command."""
    named = {
        span for _, row in tables(page("lessons")) for span in spans(" ".join(row)) if span.startswith("RUN_MODE=")
    }
    runs = {re.sub(r" WORLD_SIZE=\d| make run| docker compose up", "", span) for span in named}
    known = {re.sub(r" WORLD_SIZE=\d", "", command) for command in EXPECTED}
    assert sorted(runs - known) == []


def test_each_claim_of_the_lessons_page_has_a_command() -> None:
    """The command is a run, a puzzle, a plan, or a script whose output a page of docs/modes shows."""
    promises, _, _ = page("lessons").partition("## Where the lessons are wrong")
    shown = "".join(page(f"modes/{name}") for name in modes())
    for _, row in list(tables(promises))[4:]:  # the first rows say where to begin
        commands = spans(row[1])
        assert commands, row
        for command in commands:
            puzzle, script = re.fullmatch(r"./run puzzle (\d+)", command), command.startswith("python docs/examples/")
            if puzzle:
                assert int(puzzle[1]) in TASKS
            elif script:
                assert f"<!-- output of: {command} -->" in shown
            else:
                assert "RUN_MODE=" in command or command.startswith(("torchrun ", "./run plan ")), command
