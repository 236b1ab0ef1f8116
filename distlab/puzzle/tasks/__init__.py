"""The tasks, by number."""

from distlab.puzzle.task import Task
from distlab.puzzle.tasks import all_reduces, gradients, uneven

MODULES = (all_reduces, uneven, gradients)
TASKS: dict[int, Task] = {task.number: task for module in MODULES for task in module.TASKS}
