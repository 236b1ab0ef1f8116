"""What it costs to see: marks and profiler, `python -m benchmarks.timeline [ROUNDS]`.

Steps of `flat` data parallelism and of a pipeline at 2 ranks, three ways in one interleaved run: bare, with the marks
of a timed step recorded, and under torch.profiler as with LAB_TRACE=1. With LAB_TRACE=0 the profiler is never touched:
a timed step is the second way, and the marks inside of the mechanisms are in all three.
"""

import os
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity

from benchmarks.rounds import Timing, interleave, on_ranks, ratios, table
from benchmarks.steps import step_of
from distlab.collectives.phases import recorded
from distlab.config import Config
from distlab.mesh.grid import Mesh
from distlab.rank.mode_loader import load

STEPS = {"dp": "flat", "pp": "gpipe"}


def measure(group: dist.ProcessGroup, mode: str, rounds: int) -> dict[str, Timing]:
    """A step bare, recorded and profiled."""
    config = Config.read({"RUN_MODE": mode, "WORLD_SIZE": str(group.size())})
    bare = step_of(STEPS[mode], Mesh.grid(load(mode).axes(config), group), config)

    def marked() -> None:
        with recorded():
            bare()

    def profiled() -> None:
        with torch.profiler.profile(activities=[ProfilerActivity.CPU]), recorded():
            bare()

    ways: dict[str, Callable[[], None]] = {"bare": bare, "marks recorded": marked, "under the profiler": profiled}
    return interleave(ways, group, rounds)


def main(rounds: int = 21) -> None:
    """Print the three ways of each mode, over the bare one."""
    os.environ["KINETO_LOG_LEVEL"] = "6"  # of the ranks: below, each profile greets with two lines
    rows = []
    for mode, variant in STEPS.items():
        timings = on_ranks(2, measure, mode, rounds)
        bare = timings["bare"]
        for way, timing in timings.items():
            rows.append([f"{mode} {variant}", way, f"{timing.median_s * 1e3:.1f}", *ratios(timing, bare)])
    print("2 ranks: a step's time over the bare step's (median, and the middle half of the rounds)")
    print(table(["step", "", "ms a step", "wall", "CPU"], rows))


if __name__ == "__main__":
    main(*(int(argument) for argument in sys.argv[1:]))
