"""Task 18: several steps alone, then one mean of the weights."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from distlab.tools.puzzle.task import FLOAT64_BYTES, Bench, Bound, Task, Tensors, all_reduce_bytes, numbers

SIZE, NUM_STEPS, PERIOD, LR = 403, 7, 3, 0.05
SYNCS = 3  # after the steps 3, 6 and 7


def gradient_of(rank: int) -> Callable[[Tensor, int], Tensor]:
    def gradient(weights: Tensor, step: int) -> Tensor:
        return (1 + rank) * (weights - numbers(1800 + 10 * step + rank, SIZE))

    return gradient


def play(answer: Any, bench: Bench) -> Tensors:
    weights = numbers(1890, SIZE)
    with bench.measured():
        answer.local_sgd(weights, gradient_of(bench.rank), NUM_STEPS, PERIOD, LR, bench.group)
    return {"weights": weights}


def trained(world_size: int, syncs: list[int]) -> list[Tensors]:
    weights = [numbers(1890, SIZE) for _ in range(world_size)]
    for step in range(NUM_STEPS):
        weights = [each - LR * gradient_of(rank)(each, step) for rank, each in enumerate(weights)]
        if step + 1 in syncs:
            weights = [sum(weights[1:], weights[0]) / world_size] * world_size
    return [{"weights": each} for each in weights]


def suspects(world_size: int) -> dict[str, list[Tensors]]:
    return {
        "what comes out without the mean after the last step": trained(world_size, [3, 6]),
        "what comes out with a mean after every step": trained(world_size, list(range(1, NUM_STEPS + 1))),
        "training on its own": trained(world_size, []),
    }


TASK = Task(
    number=18,
    name="local_sgd",
    title="Local SGD",
    idea="""\
Data parallelism exchanges gradients in every step. Local SGD (Stich 2019) does several steps on each rank alone, so
that the weights diverge, and then takes the mean of the weights. With a period of 3 it sends a third of the bytes, but
it no longer computes what one process with large batches does: it is another algorithm. Its result must equal that of
one process which trains the N models in turn. Here a mean follows after every `period` steps, and after the last step
if that is none of these, so that all ranks end with equal weights.""",
    stub='''\
def local_sgd(
    weights: Tensor,
    gradient_of: Callable[[Tensor, int], Tensor],
    num_steps: int,
    period: int,
    lr: float,
    group: dist.ProcessGroup,
) -> None:
    """Do num_steps steps of SGD on weights [403], in place, with a mean over ranks after every `period` steps and after
    the last. gradient_of(weights, step) is this rank's gradient; steps count from 0. All ranks begin with equal
    weights."""
    ...
''',
    hints=(
        "weights -= lr * gradient_of(weights, step) is a step.",
        "A mean is due if (step + 1) % period == 0, or if it is the last step; not twice if it is both.",
    ),
    allowed=frozenset({"all_reduce"}),
    limits="one all_reduce of the weights for each mean",
    play=play,
    expected=lambda world_size: trained(world_size, [3, 6, 7]),
    suspects=suspects,
    bound=lambda world_size: Bound(
        rank_bytes=SYNCS * all_reduce_bytes(SIZE * FLOAT64_BYTES, world_size), calls=SYNCS
    ),
)  # fmt: skip

TASKS = (TASK,)
