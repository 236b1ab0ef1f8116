"""Tasks 1 to 3: collectives from messages. A broadcast in rounds, an all_reduce, and the ring that sends least."""

import math
from typing import Any

from torch import Tensor

from distlab.tools.puzzle.task import FLOAT64_BYTES, MESSAGES, Bench, Bound, Task, Tensors, numbers

SIZE = 1003  # no multiple of any number of ranks


def inputs(world_size: int) -> list[Tensor]:
    return [numbers(100 + rank, SIZE) for rank in range(world_size)]


# Broadcast.


def root_of(world_size: int) -> int:
    """Return the root: not 0, if possible."""
    return (world_size - 1) // 2 + (world_size == 2)


def play_broadcast(answer: Any, bench: Bench) -> Tensors:
    tensor = inputs(bench.world_size)[bench.rank]
    with bench.measured():
        answer.broadcast(tensor, root_of(bench.world_size), bench.group)
    return {"tensor": tensor}


def expected_broadcast(world_size: int) -> list[Tensors]:
    return [{"tensor": inputs(world_size)[root_of(world_size)]}] * world_size


def suspected_broadcast(world_size: int) -> dict[str, list[Tensors]]:
    own = [{"tensor": each} for each in inputs(world_size)]
    return {"the tensor of rank 0, which is not the root": [own[0]] * world_size, "what this rank had before": own}


def bound_broadcast(world_size: int) -> Bound:
    return Bound(all_bytes=(world_size - 1) * SIZE * FLOAT64_BYTES, messages=math.ceil(math.log2(world_size)))


BROADCAST = Task(
    number=1,
    name="broadcast",
    title="Broadcast from send and receive",
    idea="""\
One rank, the root, has a tensor that all others need. It could send it to each of them, but then N - 1 messages leave
the root one after another while all others wait. A rank that has the tensor already can help: in each round every such
rank sends it to one without it, so the number of ranks that have it doubles. N ranks are reached in log2(N) rounds,
rounded up. The root may be any rank, so count places from the root.""",
    stub='''\
def broadcast(tensor: Tensor, root: int, group: dist.ProcessGroup) -> None:
    """Write the root's tensor [1003] into the tensor of every rank, in place."""
    ...
''',
    hints=(
        "Give each rank a place: (rank - root) % N. The root is at place 0, whatever its rank.",
        "After round i the places 0 to 2**i - 1 have the tensor. Which of them sends to which in the next round?",
        "In a round with `reached` places done, place p < reached sends to place p + reached, if there is one.",
    ),
    allowed=MESSAGES,
    limits="no rank sends more than log2(N) messages (rounded up); all together send the tensor N - 1 times",
    play=play_broadcast,
    expected=expected_broadcast,
    suspects=suspected_broadcast,
    bound=bound_broadcast,
)


# All_reduce.


def summed(world_size: int) -> list[Tensors]:
    total = sum(inputs(world_size)[1:], inputs(world_size)[0])
    return [{"tensor": total}] * world_size


def suspected_sums(world_size: int) -> dict[str, list[Tensors]]:
    return {
        "what this rank had before": [{"tensor": each} for each in inputs(world_size)],
        "the mean, not the sum": [{"tensor": each["tensor"] / world_size} for each in summed(world_size)],
    }


def play_all_reduce(answer: Any, bench: Bench) -> Tensors:
    tensor = inputs(bench.world_size)[bench.rank]
    with bench.measured():
        answer.all_reduce(tensor, bench.group)
    return {"tensor": tensor}


ALL_REDUCE = Task(
    number=2,
    name="all_reduce",
    title="All_reduce from send and receive, for any number of ranks",
    idea="""\
Every rank has a tensor, and afterwards every rank has the sum of all of them. Data parallelism is built on this one
operation. If every rank sends its tensor to every other one, N (N - 1) tensors are sent. 2 (N - 1) are enough: first
collect the sum on the way to one rank, then pass the sum on. It must work for three ranks too, not only for powers of
two. In gloo a send returns once the other side receives: if all ranks send first, they wait forever.""",
    stub='''\
def all_reduce(tensor: Tensor, group: dist.ProcessGroup) -> None:
    """Write the sum of all ranks' tensors [1003] into the tensor of every rank, in place."""
    ...
''',
    hints=(
        "A chain is enough: the last rank sends to the one before it, which adds its own and sends on.",
        "At the end of the chain rank 0 has the sum. How do the others get it?",
        "Receive into a new tensor (torch.empty_like), or this rank's own numbers are overwritten.",
    ),
    allowed=MESSAGES,
    limits="all ranks together send at most 2 (N - 1) times the tensor",
    play=play_all_reduce,
    expected=summed,
    suspects=suspected_sums,
    bound=lambda world_size: Bound(all_bytes=2 * (world_size - 1) * SIZE * FLOAT64_BYTES),
)


# The ring.


def play_ring(answer: Any, bench: Bench) -> Tensors:
    tensor = inputs(bench.world_size)[bench.rank]
    with bench.measured():
        answer.ring_all_reduce(tensor, bench.group)
    return {"tensor": tensor}


def bound_ring(world_size: int) -> Bound:
    messages = 2 * (world_size - 1)
    return Bound(rank_bytes=messages * math.ceil(SIZE / world_size) * FLOAT64_BYTES, messages=messages)


RING = Task(
    number=3,
    name="ring_all_reduce",
    title="Ring all_reduce",
    idea="""\
In a chain rank 0 is a bottleneck: it sends the whole sum. A ring loads all ranks equally. Cut the tensor into N chunks;
each rank sends to its right neighbour and receives from its left one, all at the same time. In the first N - 1 rounds a
chunk travels on and each rank adds its own part, so that at the end each rank has one chunk of the full sum. In the
next N - 1 rounds the finished chunks travel around. Each rank sends 2 (N - 1) / N of the tensor, and no all_reduce can
do with less (Patarasuk and Yuan 2009, section 3). 1003 numbers do not divide by N: the chunks are uneven.""",
    stub='''\
def ring_all_reduce(tensor: Tensor, group: dist.ProcessGroup) -> None:
    """Write the sum of all ranks' tensors [1003] into the tensor of every rank, in place."""
    ...
''',
    hints=(
        "tensor.tensor_split(N) gives N views, of uneven sizes: what is added to a view is added to the tensor.",
        "Start the send with dist.isend, then receive, then wait for the send: so no rank waits forever.",
        "In round i of the first half rank r sends chunk r - i and receives chunk r - i - 1, both modulo N.",
        "In round i of the second half rank r sends chunk r + 1 - i and receives chunk r - i, both modulo N.",
    ),
    allowed=MESSAGES,
    limits="each rank sends at most 2 (N - 1) messages of a chunk, 2 (N - 1) / N of the tensor",
    play=play_ring,
    expected=summed,
    suspects=suspected_sums,
    bound=bound_ring,
)

TASKS = (BROADCAST, ALL_REDUCE, RING)
