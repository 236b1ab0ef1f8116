"""Interleaved rounds: how two ways to do one thing are compared on a machine that is never quite idle.

Every round runs every candidate once, so that a noisy second hits them all; the slowest rank of a round counts, and the
median of the rounds is the figure. A ratio is taken within each round, which cancels what slowed that round down; its
spread is the middle half of all rounds. CPU seconds, summed over the ranks, are the steadier figure on shared cores.
"""

import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

TIMEOUT_S = 600.0  # every variant of a mesh of 8 ranks takes minutes where two cores are shared with others


@dataclass
class Timing:
    """The rounds of one candidate: seconds of the slowest rank, and CPU seconds of all ranks, per call."""

    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)

    @property
    def median_s(self) -> float:
        return statistics.median(self.wall_s)


@dataclass(frozen=True)
class Ratio:
    """How often faster than a baseline: the median over the rounds, and the middle half of them."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, baseline: list[float], candidate: list[float]) -> "Ratio":
        ratios = [before / after for before, after in zip(baseline, candidate, strict=True)]
        low, _, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        # The ratio of the medians decides; the quartiles of single rounds say how far to trust it.
        return cls(statistics.median(baseline) / statistics.median(candidate), low, high)

    def __str__(self) -> str:
        return f"{self.median:.2f}x ({self.low:.2f}-{self.high:.2f})"


def ratios(ours: Timing, theirs: Timing) -> tuple[Ratio, Ratio]:
    """Wall and CPU time of ours over theirs: below 1 is faster."""
    return Ratio.of(ours.wall_s, theirs.wall_s), Ratio.of(ours.cpu_s, theirs.cpu_s)


def judge(seen: Iterable[float | Ratio], limits: Sequence[float], unit: str = "x") -> list[str]:
    """The limits that figures are to stay below, and whether they do, to two digits; "-" where there is none."""
    found = [each.median if isinstance(each, Ratio) else each for each in seen]
    held = all(round(each, 2) <= limit for each, limit in zip(found, limits, strict=False))
    return [" and ".join(f"{limit:.2f}{unit}" for limit in limits) or "-", ("yes" if held else "NO") if limits else "-"]


def interleave(
    candidates: dict[str, Callable[[], Any]], group: dist.ProcessGroup, rounds: int, calls: int = 1
) -> dict[str, Timing]:
    """Run each candidate `calls` times in each of `rounds` rounds, after a round that does not count; equal on all
    ranks."""
    timings = {name: Timing() for name in candidates}
    for turn in range(rounds + 1):
        for name, call in candidates.items():
            dist.barrier(group)
            cpu, wall = time.process_time(), time.perf_counter()
            for _ in range(calls):
                call()
            spent = torch.tensor([time.perf_counter() - wall, time.process_time() - cpu], dtype=torch.float64) / calls
            slowest, summed = spent[:1].clone(), spent[1:].clone()
            dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)
            dist.all_reduce(summed, group=group)
            if turn:
                timings[name].wall_s.append(slowest.item())
                timings[name].cpu_s.append(summed.item())
    return timings


def table(columns: list[str], rows: list[list[Any]]) -> str:
    """The rows as aligned text under the columns."""
    cells = [columns, *[[str(cell) for cell in row] for row in rows]]
    widths = [max(len(row[index]) for row in cells) for index in range(len(columns))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells
    )


def on_ranks(world_size: int, function: Callable[..., Any], *args: Any) -> Any:
    """What `function(group, *args)` returns on rank 0, run by `world_size` gloo ranks of one thread; None if a rank
    failed."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=_rank, args=(rank, world_size, folder, results, function, args))
            for rank in range(world_size)
        ]
        try:
            for process in ranks:
                process.start()
            value = _first(results, ranks)
            for process in ranks:
                process.join(10)
            return value
        finally:
            for process in ranks:
                process.kill()


def _first(results: Any, ranks: list[Any]) -> Any:
    deadline = time.monotonic() + TIMEOUT_S
    while results.empty():
        codes = [process.exitcode for process in ranks]
        if any(codes) or time.monotonic() > deadline:
            raise RuntimeError(f"the benchmark's ranks gave no result; their exit codes: {codes}")
        time.sleep(0.05)
    return results.get()


def _rank(
    rank: int, world_size: int, folder: str, results: Any, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    bound = timedelta(seconds=TIMEOUT_S)
    options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    # The loopback address by its own device: a machine's host name need not resolve.
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = bound
    meeting = f"file://{folder}/meeting"
    dist.init_process_group(
        "gloo", init_method=meeting, rank=rank, world_size=world_size, timeout=bound, pg_options=options
    )
    value = function(dist.group.WORLD, *args)
    if rank == 0:
        results.put(value)
    dist.barrier()
    dist.destroy_process_group()
