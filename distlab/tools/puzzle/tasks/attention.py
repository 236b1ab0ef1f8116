"""Task 20: attention over a sequence that no rank has as a whole."""

import math
from typing import Any

import torch
from torch import Tensor

from distlab.tools.puzzle.task import FLOAT64_BYTES, MESSAGES, Bench, Bound, Task, Tensors, numbers, sizes_of

SEQUENCE, WIDTH = 97, 64
Q, K, V = (numbers(2000 + place, SEQUENCE, WIDTH) for place in range(3))
Q *= 3  # so that the largest score of a block differs from block to block


def play(answer: Any, bench: Bench) -> Tensors:
    sizes = sizes_of(SEQUENCE, bench.world_size)
    q, k, v = (each.split(sizes)[bench.rank].clone() for each in (Q, K, V))
    with bench.measured():
        output = answer.ring_attention(q, k, v, sizes, bench.group)
    return {"output": output}


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.T / math.sqrt(WIDTH), 1) @ v


def expected(world_size: int) -> list[Tensors]:
    return [{"output": each} for each in attention(Q, K, V).split(sizes_of(SEQUENCE, world_size))]


def suspects(world_size: int) -> dict[str, list[Tensors]]:
    sizes = sizes_of(SEQUENCE, world_size)
    blocks = list(zip(K.split(sizes), V.split(sizes), strict=True))
    own, means = [], []
    for rank, q in enumerate(Q.split(sizes)):
        parts = [attention(q, k, v) for k, v in blocks]
        own.append({"output": parts[rank]})
        means.append({"output": torch.stack(parts).mean(0)})
    return {
        "attention to this rank's own positions alone": own,
        "the mean of each block's own attention, whatever its scores": means,
    }


def bound(world_size: int) -> Bound:
    sizes = sizes_of(SEQUENCE, world_size)
    block = max(sizes) * WIDTH * FLOAT64_BYTES
    scores = max(sizes) ** 2 * FLOAT64_BYTES
    return Bound(
        all_bytes=2 * (world_size - 1) * SEQUENCE * WIDTH * FLOAT64_BYTES,
        messages=2 * (world_size - 1),
        peak_bytes=11 * block + 4 * scores,
    )


TASK = Task(
    number=20,
    name="ring_attention",
    title="Ring attention",
    idea="""\
In context parallelism each rank has some positions of a sequence: their queries, keys and values. Attention needs the
keys and values of all positions, for which no rank has the memory. In ring attention (Liu et al. 2023) the blocks of
keys and values travel around the ring, and each rank uses the block that is there. The softmax of a row is over all
blocks, so each rank keeps the largest score so far, the sum of exp(score - largest) and the weighted sum of values, and
rescales both sums when a block has a larger score (Milakov and Gimelshein 2018). At the end it divides. There is no
mask here; the blocks are of uneven sizes.""",
    stub='''\
def ring_attention(q: Tensor, k: Tensor, v: Tensor, sizes: list[int], group: dist.ProcessGroup) -> Tensor:
    """Return softmax(q @ K.T / sqrt(64)) @ V [sizes[rank], 64] for this rank's queries q [sizes[rank], 64], where K and
    V are all ranks' k and v [sizes[r], 64], one below the other."""
    ...
''',
    hints=(
        "In round i rank r has the block of rank r - i modulo N: so it knows the size of the next block.",
        "new = torch.maximum(largest, scores.max(1).values); both sums are multiplied by exp(largest - new).",
        "Start with largest = -inf and sums of 0: exp(-inf - new) is 0.",
        "isend k and v to the right, receive into empty tensors from the left, then wait: N - 1 times.",
    ),
    allowed=MESSAGES,
    limits=(
        "every block is sent N - 1 times, a message for keys and one for values; of tensors at one time eleven blocks"
        " and four matrices of scores of one block"
    ),
    play=play,
    expected=expected,
    suspects=suspects,
    bound=bound,
)

TASKS = (TASK,)
