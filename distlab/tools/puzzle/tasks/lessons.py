"""Tasks 21 to 23: the exercises of the lessons, with their numbers and with others that an answer cannot know."""

from typing import Any

import torch
from torch import Tensor

from distlab.tools.puzzle.task import FLOAT64_BYTES, Bench, Bound, Task, Tensors, all_reduce_bytes, numbers

PARAMETERS = 5  # besides the lesson's two


def float64(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def on_all_ranks(world_size: int, tensors: Tensors) -> list[Tensors]:
    """Return equal tensors on each rank."""
    return [tensors] * world_size


def bound_of(world_size: int) -> Bound:
    """Allow one all_reduce of the lesson's two numbers, and one of the others."""
    return Bound(rank_bytes=all_reduce_bytes((2 + PARAMETERS) * FLOAT64_BYTES, world_size), calls=2)


# Two workers average their gradients.


def gradients_of(rank: int) -> Tensors:
    lesson = [float64(4, 10), float64(6, 2)]
    return {
        "lesson": lesson[rank] if rank < len(lesson) else numbers(2100 + rank, 2),
        "other": numbers(rank, PARAMETERS),
    }


def total_of(world_size: int) -> Tensors:
    of_rank = [gradients_of(rank) for rank in range(world_size)]
    return {name: torch.stack([each[name] for each in of_rank]).sum(0) for name in of_rank[0]}


def scaled(tensors: Tensors, factor: float) -> Tensors:
    return {name: factor * each for name, each in tensors.items()}


def play_average(answer: Any, bench: Bench) -> Tensors:
    gradients = gradients_of(bench.rank)
    with bench.measured():
        return {name: answer.averaged(each, bench.world_size) for name, each in gradients.items()}


def suspected_average(world_size: int) -> dict[str, list[Tensors]]:
    own, total = [gradients_of(rank) for rank in range(world_size)], total_of(world_size)
    return {
        f"the sum: divide it by the {world_size} workers": on_all_ranks(world_size, total),
        "this rank's own gradient: nothing was added up over the workers": own,
        "this rank's own gradient, divided: nothing was added up over the workers": [
            scaled(each, 1 / world_size) for each in own
        ],
        "the sum by the number of parameters: the workers count": on_all_ranks(
            world_size, {name: each / len(each) for name, each in total.items()}
        ),
    }


AVERAGE = Task(
    number=21,
    name="mean_of_two_workers",
    title="Exercise 1: the mean gradient of two workers",
    idea="""\
Each worker has computed a gradient of its own, of two parameters: [4, 10] and [6, 2]. All of them have to take the same
step, so they need the mean of their gradients, [5, 6]. dist.all_reduce(tensor) adds up a tensor over all workers, in
place, on each of them.""",
    stub='''\
def averaged(gradient: Tensor, num_workers: int) -> Tensor:
    """Return the mean over all workers of `gradient` [P], the same on each of them."""
    ...
''',
    hints=(
        "total = gradient.clone() keeps the gradient as it is; then add up `total` over all workers.",
        "What makes a mean of the sum? It is divided by what was added up: the workers, not the parameters.",
    ),
    allowed=frozenset({"all_reduce"}),
    limits="one all_reduce of the gradient",
    play=play_average,
    expected=lambda world_size: on_all_ranks(world_size, scaled(total_of(world_size), 1 / world_size)),
    suspects=suspected_average,
    bound=bound_of,
)


# A batch in microbatches, on each rank alone.

BATCHES = ((4, 16), (5, 35))  # microbatch, batch
SUMS = ([2.0, 4.0, 6.0, 8.0], [1.0, 3.0, 5.0])  # of microbatches
RATES = ((0.1, 4, 16), (0.3, 32, 80))  # base rate, base batch, batch


def play_accumulate(answer: Any, bench: Bench) -> Tensors:
    with bench.measured():
        sums = [answer.accumulated(list(each)) for each in SUMS]
        return {
            "steps": float64(*(answer.accumulation_steps(*each) for each in BATCHES)),
            "sum": float64(*(total for total, _ in sums)),
            "mean": float64(*(mean for _, mean in sums)),
            "rate": float64(*(answer.scaled_rate(*each) for each in RATES)),
        }


def expected_accumulate(world_size: int) -> list[Tensors]:
    right = {
        "steps": float64(*(batch // microbatch for microbatch, batch in BATCHES)),
        "sum": float64(*map(sum, SUMS)),
        "mean": float64(*(sum(each) / len(each) for each in SUMS)),
        "rate": float64(*(rate * batch / base for rate, base, batch in RATES)),
    }
    return on_all_ranks(world_size, right)


def suspected_accumulate(world_size: int) -> dict[str, list[Tensors]]:
    found = {
        "the batch times the microbatch: divide, do not multiply": {
            "steps": float64(*(batch * microbatch for microbatch, batch in BATCHES))
        },
        "the sum again: divide it by the number of microbatches": {"mean": float64(*map(sum, SUMS))},
        "divided by the lesson's 4 microbatches: the second time there are 3": {
            "mean": float64(*(sum(each) / 4 for each in SUMS))
        },
        "the rate of the base batch: a batch 4 times as large has 4 times the rate": {
            "rate": float64(*(rate for rate, _, _ in RATES))
        },
        "by the square root rule: the linear one multiplies by 4": {
            "rate": float64(*(rate * (batch / base) ** 0.5 for rate, base, batch in RATES))
        },
    }
    return {words: on_all_ranks(world_size, tensors) for words, tensors in found.items()}


ACCUMULATE = Task(
    number=22,
    name="microbatches",
    title="Exercise 2: a batch that does not fit, and its learning rate",
    idea="""\
A batch that does not fit into memory is computed in microbatches: their gradients are added up, and the step uses their
mean. Four microbatches with gradients 2, 4, 6 and 8 have the sum 20 and the mean 5. A larger batch asks for a larger
learning rate: by the linear scaling rule (Goyal et al. 2017) k times the batch takes k times the rate.""",
    stub='''\
def accumulation_steps(microbatch: int, batch: int) -> int:
    """Return how many microbatches of `microbatch` samples make a batch of `batch` samples."""
    ...


def accumulated(gradients: list[float]) -> tuple[float, float]:
    """Return the sum of the microbatches' gradients, and their mean, which the step uses."""
    ...


def scaled_rate(base_rate: float, base_batch: int, batch: int) -> float:
    """Return the learning rate for `batch` samples by the linear scaling rule, if `base_rate` is right for
    `base_batch`."""
    ...
''',
    hints=(
        "16 samples in microbatches of 4 are 4 steps.",
        "The mean is the sum divided by the number of microbatches, which is that of the gradients here.",
        "How many times the base batch is the batch? So many times the base rate is the rate.",
    ),
    allowed=frozenset(),
    limits="nothing is sent",
    play=play_accumulate,
    expected=expected_accumulate,
    suspects=suspected_accumulate,
)


# A step of synchronous data parallelism.

STEPS = {"lesson": (float64(0.5, 0.5), 0.1), "other": (numbers(2300, PARAMETERS), 0.5)}  # weights, learning rate


def gradient_of(name: str, rank: int) -> Tensor:
    return float64(1, 1) * (rank + 1) if name == "lesson" else numbers(2310 + rank, PARAMETERS)


def stepped(world_size: int, share: float, factor: float = -1.0, rate: float | None = None) -> list[Tensors]:
    """Return `share` times the sum of gradients, and the weights plus `factor` times the rate times that."""
    found = {}
    for name, (weights, own_rate) in STEPS.items():
        gradient = share * torch.stack([gradient_of(name, rank) for rank in range(world_size)]).sum(0)
        found[f"{name} gradient"] = gradient
        found[f"{name} weights"] = weights + factor * (own_rate if rate is None else rate) * gradient
    return on_all_ranks(world_size, found)


def play_step(answer: Any, bench: Bench) -> Tensors:
    found = {}
    with bench.measured():
        for name, (weights, rate) in STEPS.items():
            made = answer.step(weights.clone(), gradient_of(name, bench.rank), rate, bench.world_size)
            found[f"{name} gradient"], found[f"{name} weights"] = made
    return found


STEP = Task(
    number=23,
    name="synchronous_step",
    title="The mini-challenge: a step of data parallelism from scratch",
    idea="""\
In synchronous data parallelism all workers have the same weights, and each its own part of the batch. A step adds up
their gradients, divides by the number of workers, and moves the weights against the mean. Three workers with gradients
[1, 1], [2, 2] and [3, 3], weights of [0.5, 0.5] and a learning rate of 0.1 have the mean [2, 2], and then the weights
[0.3, 0.3]. So the weights stay the same on all of them.""",
    stub='''\
def step(weights: Tensor, gradient: Tensor, learning_rate: float, num_workers: int) -> tuple[Tensor, Tensor]:
    """Return the mean over all workers of `gradient` [P], and the new weights [P]; both the same on each of them."""
    ...
''',
    hints=(
        "The mean is that of puzzle 21: dist.all_reduce of a copy, then a division by the number of workers.",
        "weights - learning_rate * mean goes downhill.",
    ),
    allowed=frozenset({"all_reduce"}),
    limits="one all_reduce of the gradient",
    play=play_step,
    expected=lambda world_size: stepped(world_size, 1 / world_size),
    suspects=lambda world_size: {
        f"of the sum of the gradients: divide it by the {world_size} workers": stepped(world_size, 1.0),
        "a step uphill: weights - learning_rate * gradient": stepped(world_size, 1 / world_size, factor=1.0),
        "a step without the learning rate": stepped(world_size, 1 / world_size, rate=1.0),
        "what it was: the weights have not moved": stepped(world_size, 1 / world_size, factor=0.0),
    },
    bound=bound_of,
)

TASKS = (AVERAGE, ACCUMULATE, STEP)
