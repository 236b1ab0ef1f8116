"""Our all_reduce, reduce_scatter and all_gather against gloo's own: `python -m benchmarks.collectives [WORLD_SIZE]`.

Ratios above 1 mean that ours is faster. `auto` is what a caller gets; the algorithms behind it stand beside it, so that
one sees what was picked and whether the pick was right.
"""

import sys
import warnings
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.rounds import Ratio, Timing, interleave, on_ranks, table
from distlab.techniques.collectives.by_hand import Collective, pick
from distlab.techniques.collectives.point_to_point import split

KIB, MIB = 1 << 10, 1 << 20
PLANS = {
    64 * KIB: (21, 10),
    256 * KIB: (21, 6),
    MIB: (15, 4),
    4 * MIB: (13, 2),
    16 * MIB: (9, 1),
    64 * MIB: (7, 1),
}  # rounds, calls
TARGETS = {
    "all_reduce": {4 * MIB: 1.15, 16 * MIB: 1.15, 64 * MIB: 1.15},
    "reduce_scatter": {4 * MIB: 2.0, 64 * MIB: 3.0},
    "all_gather": {4 * MIB: 1.25, 64 * MIB: 2.2},
}
FLOOR = 0.95  # of gloo's speed, from 64 KiB up
ALGORITHMS = ("auto", "direct", "ring", "tree", "server")


def measure(group: dist.ProcessGroup) -> dict[tuple[str, int], dict[str, Timing]]:
    """The timings of every op and size, by algorithm."""
    collectives = {name: Collective(group, name) for name in ALGORITHMS} | {"gloo": Collective(group, "backend")}
    timings: dict[tuple[str, int], dict[str, Timing]] = {}
    for nbytes, (rounds, calls) in PLANS.items():
        whole = torch.zeros(nbytes // 4)
        chunk = torch.zeros_like(split(whole, group.size())[group.rank()])
        for op in TARGETS:
            candidates = {name: _call(collective, op, whole, chunk) for name, collective in collectives.items()}
            timings[op, nbytes] = interleave(candidates, group, rounds, calls)
    return timings


def _call(collective: Collective, op: str, whole: torch.Tensor, chunk: torch.Tensor) -> Any:
    peers = collective.peers
    if collective.algorithm == "backend":  # the baseline is torch.distributed itself, without our wrapping
        warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 renames these two; 2.11 has only these names
        return {
            "all_reduce": lambda: dist.all_reduce(whole, group=peers.group),
            "reduce_scatter": lambda: dist.reduce_scatter_tensor(chunk, whole, group=peers.group),
            "all_gather": lambda: dist.all_gather_into_tensor(whole, chunk, group=peers.group),
        }[op]
    return {
        "all_reduce": lambda: collective.all_reduce(whole),
        "reduce_scatter": lambda: collective.reduce_scatter(chunk, whole),
        "all_gather": lambda: collective.all_gather(whole, chunk),
    }[op]


def main(world_size: int = 4) -> None:
    """Print the table, targets beside the ratios."""
    timings = on_ranks(world_size, measure)
    rows: list[list[Any]] = []
    for (op, nbytes), by_name in sorted(timings.items()):
        gloo = by_name["gloo"]
        target = TARGETS[op].get(nbytes, FLOOR) if world_size == 4 else FLOOR
        ratios = [Ratio.of(gloo.wall_s, by_name[name].wall_s) for name in ALGORITHMS]
        cpu = Ratio.of(gloo.cpu_s, by_name["auto"].cpu_s)
        held = "yes" if ratios[0].median >= target else "NO"
        picked = pick(op, nbytes, world_size)
        size = f"{nbytes // KIB} KiB" if nbytes < MIB else f"{nbytes // MIB} MiB"
        rows.append(
            [op, size, picked, f"{gloo.median_s * 1e3:.2f}", f"{target:.2f}x", held, f"{cpu.median:.2f}x", *ratios]
        )
    columns = ["op", "size", "picked", "gloo ms", "target", "held", "auto, CPU", *ALGORITHMS]
    print(f"{world_size} ranks, one thread each: speed against gloo's own (median, and the middle half of the rounds)")
    print(table(columns, rows))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
