"""`distlab puzzle`: tasks of distributed training, answered by the learner and judged on real ranks.

task.py says what a task is, tasks/ has them, rank.py runs an answer on one rank, judge.py compares what the ranks did
with one process and with the task's bounds, runner.py brings all of that together, folder.py is the learner's folder,
learner.py what is said, there and in a notebook: `%load_ext distlab.puzzle`.
"""

from typing import Any


def load_ipython_extension(shell: Any) -> None:
    """Of `%load_ext distlab.puzzle`: have the magics %puzzle and %%puzzle."""
    from distlab.tools.puzzle.learner import Cells  # torch comes in here

    shell.register_magic_function(Cells(shell).puzzle, magic_kind="line_cell", magic_name="puzzle")
