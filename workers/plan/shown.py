"""The layout that was taken, as a run of this lab: the same axes on at most 8 ranks, with `--see`.

What a layout is made of shows on few ranks: which axes there are, which are neighbours, and what its replicas shard. So
each axis is halved, the longest first, until the product is small enough, and none that there is gets lost. All four
are twice as many ranks as that: then it is one replica, whose shards lie along cp.
"""

import math

from workers.plan.job import Job
from workers.plan.layouts import Layout

MOST_RANKS = 8


def shrunk(layout: Layout) -> dict[str, int]:
    """Ranks along each axis, the outermost first, as layouts are laid out: replicas, stages, samples, slices."""
    sizes = {"dp": layout.replicas, "pp": layout.pipeline, "cp": layout.context, "tp": layout.tensor}
    if min(sizes.values()) > 1:
        sizes["dp"] = 1
    while math.prod(sizes.values()) > MOST_RANKS:
        longest = max(sizes, key=lambda axis: sizes[axis])
        sizes[longest] = max(2, sizes[longest] // 2)
    return sizes


def command(layout: Layout, job: Job) -> str:
    """What runs it, with the formulas of the planner held against what is measured."""
    sizes = shrunk(layout)
    ranks = math.prod(sizes.values())
    mesh = ",".join(f"{axis}{size}" for axis, size in sizes.items() if size > 1) or "dp1"
    plain = "sequence" if job.sequence_parallel and sizes["tp"] > 1 else "1f1b"
    variant = f"zero{layout.stage}" if layout.stage else plain
    again = " LAB_RECOMPUTE=1" if job.recompute == "full" else ""
    return f"RUN_MODE=mesh WORLD_SIZE={ranks} LAB_MESH={mesh} LAB_VARIANT={variant}{again} make run"
