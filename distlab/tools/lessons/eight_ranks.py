"""Eight ranks that are three times as fast as one: a step is compute and communication, and only compute is divided.

A rank computes for c seconds and waits t seconds for the sum of the gradients. N ranks with a batch each are as fast as
N·c / (c + t) of one: with t = 5/3·c eight ranks are three, and each computes for 3/8 of the time, 40 % as a monitor
shows it. Here t is measured (an all_reduce of BYTES over gloo on this machine), and c is chosen so that it comes to
three; computing is pretended by a sleep, so that eight ranks have eight processors on two cores.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

NUM_RANKS = 8
NUMBERS = 1 << 20  # gradients: 4 MiB in float32, 2 in 16 bits
SHARE = 0.6  # of c in t
STEPS = 5
TIMEOUT_S = 90.0


class Way(NamedTuple):
    """How one step is made: microbatches that are computed before one sum, their type, and whether they overlap."""

    name: str
    microbatches: int = 1
    dtype: torch.dtype = torch.float32
    overlaps: bool = False


WAYS = (
    Way("as it is"),
    Way("a batch 4 times as large, or 4 microbatches a sum", microbatches=4),
    Way("gradients in 16 bits", dtype=torch.bfloat16),
    Way("the sum overlaps the backward pass", overlaps=True),
)
HEAD = ["way out", "compute ms", "sum ms", "predicted x", "measured x", "computes"]


def speedup(compute_s: float, sum_s: float, num_ranks: int = NUM_RANKS, *, overlaps: bool = False) -> float:
    """How much faster `num_ranks` are than one that computes for `compute_s` and sends nothing."""
    step_s = max(compute_s, sum_s) if overlaps else compute_s + sum_s
    return num_ranks * compute_s / step_s


def rows(on_ranks: Callable[..., list[Any]]) -> list[list[Any]]:
    """A row a way out: what the formula says with the times of the parts, and what the steps took."""
    sums = {dtype: max(on_ranks(NUM_RANKS, sum_seconds, dtype)) for dtype in (torch.float32, torch.bfloat16)}
    one_s = SHARE * sums[torch.float32]
    found = []
    for way in WAYS:
        compute_s = one_s * way.microbatches
        step_s = max(on_ranks(NUM_RANKS, step_seconds, way, compute_s))
        predicted = speedup(compute_s, sums[way.dtype], overlaps=way.overlaps)
        measured = NUM_RANKS * compute_s / step_s
        cells = [f"{1000 * compute_s:.0f}", f"{1000 * sums[way.dtype]:.0f}", f"{predicted:.1f}", f"{measured:.1f}"]
        found.append([way.name, *cells, f"{compute_s / step_s:.0%}"])
    return found


def sum_seconds(group: dist.ProcessGroup, dtype: torch.dtype) -> float:
    """On a rank: the median seconds of one all_reduce of the gradients, after a first one that is not counted."""
    return step_seconds(group, Way("", dtype=dtype), 0.0)


def step_seconds(group: dist.ProcessGroup, way: Way, compute_s: float) -> float:
    """On a rank: the median seconds of one step."""
    gradients, took = torch.ones(NUMBERS, dtype=way.dtype), []
    for _ in range(STEPS + 1):
        dist.barrier(group)
        began = time.perf_counter()
        if way.overlaps:
            work = dist.all_reduce(gradients, group=group, async_op=True)
            time.sleep(compute_s)
            assert work is not None
            work.wait()
        else:
            time.sleep(compute_s)
            dist.all_reduce(gradients, group=group)
        took.append(time.perf_counter() - began)
    return statistics.median(took[1:])
