"""Tasks 5 and 6: one gradient for all ranks. Uneven shards of a batch, and one call for many tensors."""

from typing import Any

import torch

from distlab.tools.puzzle.task import FLOAT64_BYTES, Bench, Bound, Task, Tensors, all_reduce_bytes, numbers, sizes_of

SHAPES = {"weight": (7, 5), "bias": (7,), "head": (3, 11)}
NUMBERS = 7 * 5 + 7 + 3 * 11
BATCH = 29  # samples


def own_gradients(rank: int) -> list[torch.Tensor]:
    """Return a rank's gradients; the last is a transposed view, as of a tied weight."""
    found = [numbers(300 + 10 * rank + place, *shape) for place, shape in enumerate(SHAPES.values())]
    return [*found[:-1], found[-1].T]


def named(gradients: list[torch.Tensor]) -> Tensors:
    return dict(zip(SHAPES, gradients, strict=True))


def combined(weights: list[float]) -> Tensors:
    """Return the sum of the ranks' gradients, each times its weight."""
    parts = [own_gradients(rank) for rank in range(len(weights))]
    weighted = [[weight * each for each in part] for weight, part in zip(weights, parts, strict=True)]
    return named([sum(each[1:], each[0]) for each in zip(*weighted, strict=True)])


# Uneven shards.


def play_average(answer: Any, bench: Bench) -> Tensors:
    gradients = own_gradients(bench.rank)
    with bench.measured():
        answer.average_gradients(gradients, sizes_of(BATCH, bench.world_size)[bench.rank], bench.group)
    return named(gradients)


def expected_average(world_size: int) -> list[Tensors]:
    return [combined([size / BATCH for size in sizes_of(BATCH, world_size)])] * world_size


def suspected_average(world_size: int) -> dict[str, list[Tensors]]:
    own = [named(own_gradients(rank)) for rank in range(world_size)]
    sizes = sizes_of(BATCH, world_size)
    weighted = [combined([size / (world_size * mine) for size in sizes]) for mine in sizes]

    def on_all_ranks(weights: list[float]) -> list[Tensors]:
        return [combined(weights)] * world_size

    return {
        "what this rank had before": own,
        "the mean of the ranks' means, as if all had the same number of samples": on_all_ranks(
            [1 / world_size] * world_size
        ),
        "divided by N times this rank's own number of samples, not by that of all ranks": weighted,
        "the sum of the ranks' means divided by all samples": on_all_ranks([1 / BATCH] * world_size),
        "the sum of the ranks' means": on_all_ranks([1.0] * world_size),
        "the sum over all samples, not the mean": on_all_ranks([float(size) for size in sizes]),
    }


AVERAGE = Task(
    number=5,
    name="average_gradients",
    title="Average gradients of uneven shards",
    idea="""\
In data parallelism each rank computes the gradient of the mean loss over its own samples. The training needs the
gradient of the mean loss over all samples of all ranks. With equal shards that is the mean of the gradients. With
uneven shards it is not: a rank with 3 samples would count as much as one with 12. So undo each rank's mean first, sum
up, and divide by the number of all samples, which no rank knows alone.""",
    stub='''\
def average_gradients(gradients: list[Tensor], num_samples: int, group: dist.ProcessGroup) -> None:
    """Replace each gradient, that of the mean loss over this rank's num_samples, by that of the mean over all ranks'
    samples, in place. The shapes are [7, 5], [7] and [11, 3]; not all are contiguous."""
    ...
''',
    hints=(
        "Sums can be added, means cannot: gradient * num_samples is the gradient of the sum over this rank's samples.",
        "The number of all samples is a sum over ranks too: one more all_reduce, of a tensor with one number.",
    ),
    allowed=frozenset({"all_reduce"}),
    limits="one all_reduce per gradient and one more; 2 (N - 1) / N of the gradients and one number are sent",
    play=play_average,
    expected=expected_average,
    suspects=suspected_average,
    bound=lambda world_size: Bound(
        rank_bytes=all_reduce_bytes((NUMBERS + 1) * FLOAT64_BYTES, world_size), calls=len(SHAPES) + 1
    ),
)


# One bucket.


def play_bucket(answer: Any, bench: Bench) -> Tensors:
    gradients = own_gradients(bench.rank)
    with bench.measured():
        answer.average_in_one_call(gradients, bench.group)
    return named(gradients)


def suspected_bucket(world_size: int) -> dict[str, list[Tensors]]:
    return {
        "what this rank had before": [named(own_gradients(rank)) for rank in range(world_size)],
        "the sum, not the mean": [combined([1.0] * world_size)] * world_size,
    }


BUCKET = Task(
    number=6,
    name="one_bucket",
    title="One flat bucket",
    idea="""\
Each call has a fixed cost, whatever its size: a model with 69 tensors that sends each by itself pays it 69 times a
step. So copy all gradients into one flat tensor, a bucket, average that in one call, and copy the parts back. The
copies cost memory bandwidth, which is cheap compared with a message. Take care of gradients that are not contiguous:
for them reshape(-1) makes a copy, and what is written into the copy is lost.""",
    stub='''\
def average_in_one_call(gradients: list[Tensor], group: dist.ProcessGroup) -> None:
    """Replace each gradient by its mean over the ranks, in place, with a single all_reduce. The shapes are [7, 5], [7]
    and [11, 3]; not all are contiguous."""
    ...
''',
    hints=(
        "torch.cat([each.reshape(-1) for each in gradients]) is the bucket.",
        "bucket.split([each.numel() for each in gradients]) gives the parts back, in the same order.",
        "gradient.copy_(part.view(gradient.shape)) writes into the gradient itself, however it is laid out.",
    ),
    allowed=frozenset({"all_reduce"}),
    limits="one call; 2 (N - 1) / N of the gradients are sent",
    play=play_bucket,
    expected=lambda world_size: [combined([1 / world_size] * world_size)] * world_size,
    suspects=suspected_bucket,
    bound=lambda world_size: Bound(rank_bytes=all_reduce_bytes(NUMBERS * FLOAT64_BYTES, world_size), calls=1),
)  # fmt: skip

TASKS = (AVERAGE, BUCKET)
