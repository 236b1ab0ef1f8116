"""`distlab puzzle`: tasks of distributed training, answered by the learner and judged on real ranks.

task.py defines a task, tasks/ has all of them, rank.py runs an answer on one rank, judge.py compares the ranks' results
with one process and with the task's bounds, runner.py combines these, folder.py is the learner's folder, learner.py
formats the output, there and in a notebook: `%load_ext distlab.puzzle`.
"""

from typing import Any


def load_ipython_extension(shell: Any) -> None:
    """Register %puzzle and %%puzzle for `%load_ext distlab.puzzle`."""
    from distlab.tools.puzzle.learner import Cells  # imports torch

    shell.register_magic_function(Cells(shell).puzzle, magic_kind="line_cell", magic_name="puzzle")
