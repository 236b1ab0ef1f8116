"""The tasks, by number."""

from distlab.puzzle.task import Task
from distlab.puzzle.tasks import all_reduces, gradients, overlap, pipeline, tensor_parallel, uneven, zero

MODULES = (all_reduces, uneven, gradients, overlap, tensor_parallel, pipeline, zero)
TASKS: dict[int, Task] = {task.number: task for module in MODULES for task in module.TASKS}
