"""Tasks 16 and 17: send less of a gradient, and keep the rest for later. Top-k and PowerSGD, with error feedback."""

from typing import Any

import torch
from torch import Tensor

from distlab.tools.puzzle.task import FLOAT64_BYTES, Bench, Bound, Task, Tensors, all_reduce_bytes, numbers

STEPS = 3

# Top-k.

SIZE, K = 601, 37
INDEX_BYTES = 8


def sparse_gradient(rank: int, step: int) -> Tensor:
    return numbers(1600 + 10 * step + rank, SIZE)


def play_topk(answer: Any, bench: Bench) -> Tensors:
    error = torch.zeros(SIZE, dtype=torch.float64)
    found: Tensors = {}
    with bench.measured():
        for step in range(STEPS):
            mean = answer.topk_step(sparse_gradient(bench.rank, step), error, K, bench.group)
            found |= {f"mean {step}": mean, f"error {step}": error.clone()}
    return found


def topk(world_size: int, *, feedback: bool = True) -> list[Tensors]:
    errors = [torch.zeros(SIZE, dtype=torch.float64) for _ in range(world_size)]
    found: list[Tensors] = [{} for _ in range(world_size)]
    for step in range(STEPS):
        mean = torch.zeros(SIZE, dtype=torch.float64)
        for rank in range(world_size):
            wanted = sparse_gradient(rank, step) + (errors[rank] if feedback else 0)
            places = wanted.abs().argsort(descending=True)[:K]
            sent = torch.zeros_like(wanted).index_copy(0, places, wanted[places])
            errors[rank] = wanted - sent
            mean += sent / world_size
        for rank in range(world_size):
            found[rank] |= {f"mean {step}": mean.clone(), f"error {step}": errors[rank].clone()}
    return found


def suspected_topk(world_size: int) -> dict[str, list[Tensors]]:
    whole = [{f"error {step}": sparse_gradient(rank, step) for step in range(1)} for rank in range(world_size)]
    zero = [{f"error {step}": torch.zeros(SIZE, dtype=torch.float64) for step in range(STEPS)}] * world_size
    summed = [{name: world_size * each for name, each in tensors.items()} for tensors in topk(world_size)]
    return {
        "0: what was not sent is lost": zero,
        "all that was wanted, also what was sent, which is added twice": whole,
        "what comes out if errors are kept and never added": topk(world_size, feedback=False),
        "the sum, not the mean": summed,
    }


TOPK = Task(
    number=16,
    name="topk_error_feedback",
    title="Top-k with error feedback",
    idea="""\
Instead of a whole gradient each rank sends its k largest numbers by size, and their places. That saves most bytes and
leaves most of the gradient out. The rest is not lost: each rank keeps it as its error, and adds it to its next
gradient, so that all of it is sent sooner or later (Stich et al. 2018; Karimireddy et al. 2019). Ranks choose different
places, so they cannot sum with an all_reduce: each rank gathers all values and places, and adds them up.""",
    stub='''\
def topk_step(gradient: Tensor, error: Tensor, k: int, group: dist.ProcessGroup) -> Tensor:
    """Return the mean over ranks [601], on all ranks, of what they send: of gradient + error the k numbers that are
    largest by size, and 0 elsewhere. error [601] becomes what this rank has not sent, in place."""
    ...
''',
    hints=(
        "(gradient + error).abs().topk(k).indices are the places.",
        "error is gradient + error at all places but those that are sent, and 0 there.",
        "Two all_gathers, of values and of places, then mean.index_add_(0, places, values) for each rank.",
    ),
    allowed=frozenset({"all_gather"}),
    limits="k values and k places of 8 bytes from each rank to each other one, in at most two calls per step",
    play=play_topk,
    expected=topk,
    suspects=suspected_topk,
    bound=lambda world_size: Bound(
        rank_bytes=STEPS * (world_size - 1) * K * (FLOAT64_BYTES + INDEX_BYTES), calls=2 * STEPS
    ),
)  # fmt: skip


# PowerSGD.

ROWS, COLUMNS, RANK = 31, 23, 3


def matrix(rank: int, step: int) -> Tensor:
    return numbers(1700 + 10 * step + rank, ROWS, COLUMNS)


def play_powersgd(answer: Any, bench: Bench) -> Tensors:
    error, q = torch.zeros(ROWS, COLUMNS, dtype=torch.float64), numbers(1790, COLUMNS, RANK)
    found: Tensors = {}
    with bench.measured():
        for step in range(STEPS):
            mean, q = answer.powersgd_step(matrix(bench.rank, step), error, q, bench.group)
            found |= {f"mean {step}": mean, f"error {step}": error.clone()}
    return found


def powersgd(world_size: int, *, orthogonal: bool = True, feedback: bool = True) -> list[Tensors]:
    errors = [torch.zeros(ROWS, COLUMNS, dtype=torch.float64) for _ in range(world_size)]
    q = numbers(1790, COLUMNS, RANK)
    found: list[Tensors] = [{} for _ in range(world_size)]
    for step in range(STEPS):
        wanted = [matrix(rank, step) + (errors[rank] if feedback else 0) for rank in range(world_size)]
        mean = torch.stack(wanted).mean(0)
        p = mean @ q
        p = torch.linalg.qr(p).Q if orthogonal else p
        q = mean.T @ p
        for rank in range(world_size):
            errors[rank] = wanted[rank] - p @ q.T
            found[rank] |= {f"mean {step}": p @ q.T, f"error {step}": errors[rank].clone()}
    return found


POWERSGD = Task(
    number=17,
    name="powersgd",
    title="PowerSGD",
    idea="""\
A gradient of a layer is a matrix [n, m], and close to one of low rank. PowerSGD (Vogels et al. 2019, algorithm 1) sends
two thin matrices in its place. With M = gradient + error: P = M q is averaged over ranks and its columns are made
orthonormal; q = M^T P is averaged too; P q^T is what all ranks take for the mean gradient. Both are linear in M, so an
all_reduce of thin matrices gives just what the mean of M would. q is kept for the next step, which makes it a power
iteration, and what P q^T leaves out of a rank's own M is that rank's error.""",
    stub='''\
def powersgd_step(
    gradient: Tensor, error: Tensor, q: Tensor, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor]:
    """Return P q^T [31, 23] and the new q [23, 3], the same on all ranks. gradient and error [31, 23] are this rank's,
    q [23, 3] is the same on all. error becomes gradient + error - P q^T, in place."""
    ...
''',
    hints=(
        "Average P over ranks before it is made orthonormal, not after: all ranks need the same P.",
        "torch.linalg.qr(p).Q has orthonormal columns that span the same space.",
        "The new q is the mean over ranks of M^T P; divide by N after the all_reduce.",
    ),
    allowed=frozenset({"all_reduce"}),
    limits="two all_reduces per step, of [31, 3] and of [23, 3]",
    play=play_powersgd,
    expected=powersgd,
    suspects=lambda world_size: {
        "what comes out if P is not made orthonormal": powersgd(world_size, orthogonal=False),
        "what comes out if errors are never added": powersgd(world_size, feedback=False),
    },
    bound=lambda world_size: Bound(
        rank_bytes=STEPS * all_reduce_bytes((ROWS + COLUMNS) * RANK * FLOAT64_BYTES, world_size), calls=2 * STEPS
    ),
)

TASKS = (TOPK, POWERSGD)
