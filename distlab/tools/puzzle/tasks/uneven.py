"""Task 4: reduce_scatter and all_gather with parts of uneven sizes, which gloo's own do not take."""

from typing import Any

import torch

from distlab.tools.puzzle.task import FLOAT64_BYTES, MESSAGES, Bench, Bound, Task, Tensors, numbers, sizes_of

SIZE = 997


def whole(world_size: int) -> torch.Tensor:
    return torch.stack([numbers(200 + rank, SIZE) for rank in range(world_size)]).sum(0)


def play(answer: Any, bench: Bench) -> Tensors:
    sizes = sizes_of(SIZE, bench.world_size)
    tensor = numbers(200 + bench.rank, SIZE)
    with bench.measured():
        part = answer.reduce_scatter(tensor, sizes, bench.group)
        gathered = answer.all_gather(part, sizes, bench.group)
    return {"part": part, "gathered": gathered}


def expected(world_size: int) -> list[Tensors]:
    total = whole(world_size)
    return [{"part": part, "gathered": total} for part in total.split(sizes_of(SIZE, world_size))]


def suspects(world_size: int) -> dict[str, list[Tensors]]:
    sizes, parts = sizes_of(SIZE, world_size), whole(world_size).split(sizes_of(SIZE, world_size))
    own = [{"part": numbers(200 + rank, SIZE).split(sizes)[rank]} for rank in range(world_size)]
    rotated = [{"gathered": torch.cat([*parts[rank:], *parts[:rank]])} for rank in range(world_size)]
    return {"this rank's own part, to which no other was added": own, "in another order, its own part first": rotated}


TASK = Task(
    number=4,
    name="reduce_scatter_all_gather",
    title="Reduce_scatter and all_gather, uneven",
    idea="""\
An all_reduce is two steps: reduce_scatter, after which rank r has part r of the sum, and all_gather, after which all
have all parts. Sharded training (ZeRO, FSDP) uses the two apart, and does something between them. Layers do not divide
by the number of ranks, so the parts here have uneven sizes: sizes[r] is how many numbers rank r gets. A rank sends to
another one what that one needs, and no more. gloo's own operations take equal parts alone.""",
    stub='''\
def reduce_scatter(tensor: Tensor, sizes: list[int], group: dist.ProcessGroup) -> Tensor:
    """Return this rank's part [sizes[rank]] of the sum of all ranks' tensors [sum(sizes)]."""
    ...


def all_gather(part: Tensor, sizes: list[int], group: dist.ProcessGroup) -> Tensor:
    """Return the parts of all ranks, [sizes[0]], [sizes[1]], ..., in one tensor [sum(sizes)]."""
    ...
''',
    hints=(
        "tensor.split(sizes) gives the parts as views. Part r of yours is for rank r.",
        "Start all sends with dist.isend, then receive from each other rank, then wait for the sends.",
        "In all_gather receive into an empty tensor of sizes[r], and use torch.cat at the end.",
    ),
    allowed=MESSAGES,
    limits="all ranks together send at most N - 1 times the tensor in each of the two functions",
    play=play,
    expected=expected,
    suspects=suspects,
    bound=lambda world_size: Bound(all_bytes=2 * (world_size - 1) * SIZE * FLOAT64_BYTES),
)

TASKS = (TASK,)
