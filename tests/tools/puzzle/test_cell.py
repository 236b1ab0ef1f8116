"""The puzzles in a notebook; the tests take the place of IPython's shell."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from distlab import puzzle
from distlab.tools.puzzle.learner import Cells
from distlab.tools.puzzle.tasks import TASKS
from tests.tools.puzzle.cases import ANSWERS

Typed = Callable[..., str]


class Shell:
    """The part of IPython's shell that the extension uses."""

    def __init__(self) -> None:
        self.magics: dict[str, Any] = {}
        self.next_input = ""

    def register_magic_function(self, function: Any, magic_kind: str, magic_name: str) -> None:
        assert magic_kind == "line_cell"
        self.magics[magic_name] = function

    def set_next_input(self, text: str) -> None:
        self.next_input = text


@pytest.fixture
def shell() -> Shell:
    return Shell()


@pytest.fixture
def typed(shell: Shell, capsys: pytest.CaptureFixture[str]) -> Iterator[Typed]:
    """`typed("7 --hint")`, or with a cell, returns what is printed."""
    puzzle.load_ipython_extension(shell)
    cells: Cells = shell.magics["puzzle"].__self__

    def type_line(line: str, cell: str | None = None) -> str:
        shell.magics["puzzle"](line, cell)
        return capsys.readouterr().out

    yield type_line
    cells.close()


def test_a_line_lists_gives_hints_and_makes_a_cell(typed: Typed, shell: Shell) -> None:
    assert typed("").splitlines()[0] == f" 1  -           {TASKS[1].title}"
    assert typed("5 --hint") == f"hint 1 of {len(TASKS[5].hints)}: {TASKS[5].hints[0]}\n"
    assert typed("5") == ""
    assert shell.next_input.startswith('%%puzzle 5\n"""Puzzle 5: ')


@pytest.mark.parametrize("line", ["99", "five", "5 --all"])
def test_an_invalid_line_is_refused(typed: Typed, line: str) -> None:
    assert typed(line).startswith(f"refused    {line!r} is no puzzle, allowed: 1 to {len(TASKS)}")


@pytest.mark.timeout(180)
def test_a_cell_is_judged_and_its_lines_are_the_cells(typed: Typed, shell: Shell) -> None:
    typed("6")
    assert "to fill in, there is still `...` in the cell" in typed("6", shell.next_input.partition("\n")[2])
    printed = typed("6", "def average_in_one_call(gradients, group):\n    return gradients[9]\n")
    assert "ranks 0 and 1 raised IndexError: list index out of range at 06_one_bucket.py:3\n" in printed
    assert "One flat bucket: passed in " in typed("6", (ANSWERS / TASKS[6].file).read_text())
    assert " 6  passed " in typed("")
