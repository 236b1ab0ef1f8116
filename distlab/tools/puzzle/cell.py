"""The puzzles as cells of a notebook: `%puzzle` lists them, `%puzzle 7` makes a cell to fill in, which begins with
`%%puzzle 7` and is judged when it is run, `%puzzle 7 --hint` gives the next hint.

The answers of a notebook are its cells: they are judged as files of a folder that ends with the kernel, whose lines
count as the cell's.
"""

import atexit
import shutil
import tempfile
from pathlib import Path
from typing import Any

from distlab.tools.puzzle.folder import Folder, stub_of
from distlab.tools.puzzle.learner import judge_file, listed, next_hint, told
from distlab.tools.puzzle.runner import Runner
from distlab.tools.puzzle.tasks import TASKS


class Cells:
    """The answers of one notebook; `shell` is IPython's."""

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self._folder = Folder(Path(tempfile.mkdtemp(prefix="distlab-puzzles-")))
        self._runner = Runner(self._folder.path)  # its ranks stay warm from cell to cell
        atexit.register(self.close)

    def puzzle(self, line: str, cell: str | None = None) -> None:
        """What is typed behind `%puzzle` or `%%puzzle`, and the cell below."""
        words = line.split()
        hint = words[1:] == ["--hint"] and cell is None
        task = TASKS.get(int(words[0])) if words and words[0].isdigit() else None
        if not words and cell is None:
            print("\n".join(listed(self._folder)))
        elif task is None or len(words) > 1 + hint:
            print(
                f"refused    {line.strip()!r} is no puzzle, allowed: 1 to {max(TASKS)}, and in a line of its own --hint"
            )
        elif hint:
            print(next_hint(self._folder, task))
        elif cell is None:
            self._shell.set_next_input(f"%%puzzle {task.number}\n{stub_of(task)}")
        else:
            file = self._folder.file(task)
            file.write_text(f"\n{cell}")  # the line of the magic is the cell's first
            print("\n".join(told(task, judge_file(self._folder, task, self._runner), Path("the cell"))))

    def close(self) -> None:
        """End the ranks; nothing of them is left."""
        self._runner.close()
        shutil.rmtree(self._folder.path, ignore_errors=True)
        atexit.unregister(self.close)
