"""Eight ranks that are three times as fast as one: a step is compute and communication, and only compute is divided.

    python docs/examples/eight_ranks.py

A rank computes for c seconds and waits t seconds for the sum of the gradients. N ranks with a batch each are as fast as
N·c / (c + t) of one: with t = 5/3·c eight ranks are three, and each computes for 3/8 of the time, 40 % as a monitor
shows it. Here t is measured (an all_reduce over gloo on this machine), and c is chosen so that it comes to three;
computing is pretended by a sleep, so that eight ranks have eight processors on two cores.
"""

import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing

NUM_RANKS = 8
NUMBERS = 1 << 20  # gradients: 4 MiB in float32, 2 in 16 bits
SHARE = 0.6  # of c in t
STEPS = 5


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


def speedup(compute_s: float, sum_s: float, *, overlaps: bool = False) -> float:
    """How much faster the ranks are than one that computes for `compute_s` and sends nothing."""
    step_s = max(compute_s, sum_s) if overlaps else compute_s + sum_s
    return NUM_RANKS * compute_s / step_s


def step_seconds(way: Way, compute_s: float) -> float:
    """The median seconds of one step of the slowest rank, after a first one that is not counted."""
    gradients, took = torch.ones(NUMBERS, dtype=way.dtype), []
    for _ in range(STEPS + 1):
        dist.barrier()
        began = time.perf_counter()
        if way.overlaps:
            work = dist.all_reduce(gradients, async_op=True)
            time.sleep(compute_s)
            assert work is not None
            work.wait()
        else:
            time.sleep(compute_s)
            dist.all_reduce(gradients)
        took.append(time.perf_counter() - began)
    slowest = torch.tensor(statistics.median(took[1:]))
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest)


def rows() -> Iterator[str]:
    """A row a way out: what the formula says with the times of the parts, and what the steps took."""
    sums_s = {dtype: step_seconds(Way("", dtype=dtype), 0.0) for dtype in (torch.float32, torch.bfloat16)}
    yield f"{'way out':<50}{'compute ms':>12}{'sum ms':>8}{'predicted x':>13}{'measured x':>12}{'computes':>10}"
    for way in WAYS:
        compute_s, sum_s = SHARE * sums_s[torch.float32] * way.microbatches, sums_s[way.dtype]
        step_s = step_seconds(way, compute_s)
        predicted, measured = speedup(compute_s, sum_s, overlaps=way.overlaps), NUM_RANKS * compute_s / step_s
        times = f"{1000 * compute_s:>12.0f}{1000 * sum_s:>8.0f}"
        yield f"{way.name:<50}{times}{predicted:>13.1f}{measured:>12.1f}{compute_s / step_s:>10.0%}"


def be_rank(rank: int, file: str) -> None:
    """One of the ranks, which meet in this file; the first one prints."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the host's own name need not resolve
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=NUM_RANKS)
    for row in rows():
        if rank == 0:
            print(row, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.start_processes(be_rank, (f"{folder}/ranks",), nprocs=NUM_RANKS, start_method="fork")
