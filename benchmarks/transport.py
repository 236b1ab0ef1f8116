"""Plain TCP against gloo: `python -m benchmarks.transport [WORLD_SIZE]`.

Ratios above 1 mean that plain TCP is faster than torch.distributed over gloo; `by hand` by the lab's own `Collective`
over a channel, `as a group` through torch.distributed as well, which is how modes call it. Each round runs all three,
one after the other.
"""

import sys
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.rounds import TIMEOUT_S, Ratio, Timing, interleave, on_ranks, table
from distlab.collectives import rooted
from distlab.collectives.by_hand import Collective
from distlab.collectives.point_to_point import Pending, split
from distlab.transport.process_group import TcpBackend

KIB, MIB = 1 << 10, 1 << 20
# Rounds, and calls in each: so many that it does not matter when each rank leaves the barrier before them.
PLANS = {
    64: (11, 60),
    4 * KIB: (11, 60),
    64 * KIB: (11, 40),
    256 * KIB: (15, 6),
    MIB: (15, 4),
    4 * MIB: (13, 2),
    16 * MIB: (9, 1),
    64 * MIB: (7, 1),
}
SMALL, LARGE = 64 * KIB, 4 * MIB
SMALL_TARGETS = {"all_reduce": 30.0, "broadcast": 15.0, "all_gather": 15.0, "reduce_scatter": 15.0}
LARGE_TARGETS = {"all_reduce": 1.2}


def target(op: str, nbytes: int, world_size: int) -> float | None:
    """How often faster it is to be on 4 ranks; None where nothing is asked."""
    if world_size != 4:
        return None
    return SMALL_TARGETS[op] if nbytes <= SMALL else LARGE_TARGETS.get(op) if nbytes >= LARGE else None


def measure(world: dist.ProcessGroup) -> dict[tuple[str, int], dict[str, Timing]]:
    """The timings of every operation and size, by transport."""
    warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 renames two of these; 2.11 has only these names
    dialling = TcpBackend("127.0.0.1", b"a benchmark")
    dialling.register()
    group = dist.new_group(backend="tcp")
    store = dist.PrefixStore("by hand", dist.distributed_c10d._get_default_store())
    channel = dialling.channel(store, range(world.size()), world.rank(), "by hand", TIMEOUT_S)
    collective, timings = Collective(world, carrier=channel), {}
    for nbytes, (rounds, calls) in PLANS.items():
        whole = torch.zeros(nbytes // 4)
        chunk = torch.zeros_like(split(whole, world.size())[world.rank()])
        for op in SMALL_TARGETS:
            candidates = {
                "gloo": called(op, whole, chunk, world),
                "by hand": by_hand(op, whole, chunk, collective),
                "as a group": called(op, whole, chunk, group),
            }
            timings[op, nbytes] = interleave(candidates, world, rounds, calls)
    return timings


def called(op: str, whole: torch.Tensor, chunk: torch.Tensor, group: Any) -> Callable[[], Any]:
    """One call of an operation over a group."""
    return {
        "all_reduce": partial(dist.all_reduce, whole, group=group),
        "broadcast": partial(dist.broadcast, whole, 0, group=group),
        "all_gather": partial(dist.all_gather_into_tensor, whole, chunk, group=group),
        "reduce_scatter": partial(dist.reduce_scatter_tensor, chunk, whole, group=group),
    }[op]


def by_hand(op: str, whole: torch.Tensor, chunk: torch.Tensor, collective: Collective) -> Callable[[], Any]:
    """The same over a channel."""
    peers = collective.peers.blocking()
    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": partial(collective.all_reduce, whole),
        "broadcast": lambda: Pending(rooted.broadcast(peers, whole, 0)).wait(),
        "all_gather": partial(collective.all_gather, whole, chunk),
        "reduce_scatter": partial(collective.reduce_scatter, chunk, whole),
    }
    return calls[op]


def main(world_size: int = 4) -> None:
    """Print the table, targets beside the ratios."""
    rows: list[list[Any]] = []
    for (op, nbytes), timings in sorted(on_ranks(world_size, measure).items()):
        gloo, own, group = timings.values()
        ratio, cpu = Ratio.of(gloo.wall_s, own.wall_s), Ratio.of(gloo.cpu_s, own.cpu_s)
        wanted = target(op, nbytes, world_size)
        held = "" if wanted is None else "yes" if ratio.median >= wanted else "NO"
        size = f"{nbytes} B" if nbytes < KIB else f"{nbytes // KIB} KiB" if nbytes < MIB else f"{nbytes // MIB} MiB"
        us = [f"{timing.median_s * 1e6:.0f}" for timing in (gloo, own)]
        goal = "" if wanted is None else f"{wanted:g}x"
        grouped = f"{Ratio.of(gloo.wall_s, group.wall_s).median:.2f}x"
        rows.append([op, size, *us, ratio, goal, held, f"{cpu.median:.2f}x", grouped])
    columns = ["op", "size", "gloo us", "by hand us", "over gloo", "target", "held", "CPU", "as a group"]
    print(f"{world_size} ranks, one thread each: speed of plain TCP against gloo's (median, middle half of the rounds)")
    print(table(columns, rows))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
