"""Task 19: a checkpoint that survives a kill. The last rank is killed by the kernel while it writes."""

import resource
import signal
from typing import Any

import torch

from distlab.tools.puzzle.task import Bench, Task, Tensors, numbers

SIZE = 20_011  # 160 kB per rank
KILL_AT_BYTES = 70_000  # of any file


def shard(rank: int, step: int) -> torch.Tensor:
    """Return a shard of uneven size."""
    return numbers(1900 + 10 * step + rank, SIZE + 7 * rank)


def play(answer: Any, bench: Bench) -> Tensors:
    """Save step 1, and be killed while saving step 2: a process that lets a file grow further gets SIGXFSZ."""
    with bench.measured():
        answer.save(shard(bench.rank, 1), 1, bench.folder, bench.group)
    if bench.rank == bench.world_size - 1:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_FSIZE, (KILL_AT_BYTES, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    answer.save(shard(bench.rank, 2), 2, bench.folder, bench.group)
    return {}


def resume(answer: Any, bench: Bench) -> Tensors:
    """Load the checkpoint on new ranks, save step 3, and load that."""
    with bench.measured():
        step, found = answer.load(bench.folder, bench.group)
        answer.save(shard(bench.rank, 3), 3, bench.folder, bench.group)
        later, after = answer.load(bench.folder, bench.group)
    return {
        "step after the kill": torch.tensor(step),
        "shard after the kill": found,
        "step after the next save": torch.tensor(later),
        "shard after the next save": after,
    }


def expected(world_size: int) -> list[Tensors]:
    return [
        {
            "step after the kill": torch.tensor(1),
            "shard after the kill": shard(rank, 1),
            "step after the next save": torch.tensor(3),
            "shard after the next save": shard(rank, 3),
        }
        for rank in range(world_size)
    ]


def suspects(world_size: int) -> dict[str, list[Tensors]]:
    second = {"step after the kill": torch.tensor(2)}
    return {"the step in which the run was killed, which not all ranks have saved": [second] * world_size}


TASK = Task(
    number=19,
    name="checkpoint",
    title="A checkpoint that survives a kill",
    idea="""\
A job of many ranks is killed sooner or later, and often while it saves. Then the disk must still have a complete
checkpoint of all ranks at one step. Two things can go wrong. A file that is being overwritten is neither old nor new:
so write another file, and rename it with os.replace, which is atomic. And ranks may be at different steps: some have
finished the new one when another is killed. So each step has its own files, and only after all ranks have written
theirs one rank records, atomically again, that this step is the one to load. Here the kernel kills the last rank in the
middle of its file of step 2, then new ranks load: all have to find step 1.""",
    stub='''\
def save(shard: Tensor, step: int, folder: str, group: dist.ProcessGroup) -> None:
    """Save this rank's shard [S_r] of a step into the folder, which all ranks share and which is there. A rank may be
    killed at any time; a call of its peers may raise then."""
    ...


def load(folder: str, group: dist.ProcessGroup) -> tuple[int, Tensor]:
    """Return the last step that all ranks have saved, and this rank's shard of it."""
    ...
''',
    hints=(
        'torch.save(shard, path + ".part"), then os.replace(path + ".part", path); the path has step and rank in it.',
        "dist.barrier(group=group) returns once all ranks have called it: then all files exist.",
        "After the barrier rank 0 writes the number of the step into a file `latest`, in the same two steps.",
        "Before save returns, all ranks have to know that `latest` is written: a second barrier.",
    ),
    allowed=frozenset({"barrier", "all_reduce", "broadcast", "all_gather"}),
    limits="none on bytes; after the kill all ranks load one and the same whole step",
    play=play,
    resume=resume,
    expected=expected,
    suspects=suspects,
)

TASKS = (TASK,)
