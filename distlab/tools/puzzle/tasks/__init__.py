"""The 23 tasks, by number."""

from distlab.tools.puzzle.task import Task
from distlab.tools.puzzle.tasks import (
    all_reduces,
    attention,
    checkpoint,
    compression,
    gradients,
    lessons,
    local_sgd,
    overlap,
    pipeline,
    tensor_parallel,
    uneven,
    zero,
)

MODULES = (
    all_reduces, uneven, gradients, overlap, tensor_parallel, pipeline, zero, compression, local_sgd, checkpoint,
    attention, lessons,
)  # fmt: skip
TASKS: dict[int, Task] = {task.number: task for module in MODULES for task in module.TASKS}
