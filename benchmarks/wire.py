"""Wire bytes of every hand-written collective against its formula: `python -m benchmarks.wire [WORLD_SIZE]`.

The strict target: within 1 % from 256 KiB up, on the rank that is farthest off, with nothing allowed for headers.
"""

import sys
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.rounds import on_ranks, table
from distlab.collectives import costs as formulas
from distlab.collectives.by_hand import ALGORITHMS, Collective
from distlab.collectives.point_to_point import split
from distlab.measure.traffic import Ledger

SIZES = {"256 KiB": 256 << 10, "1 MiB": 1 << 20, "4 MiB": 4 << 20}
BYTES = {
    "all_reduce": formulas.all_reduce_bytes,
    "reduce_scatter": formulas.reduce_scatter_bytes,
    "all_gather": formulas.all_gather_bytes,
}
TARGET = 0.01


def measure(group: dist.ProcessGroup) -> dict[tuple[str, str, str], float | None]:
    """How far this op, algorithm and size is off at most, over the formula; None where the kernel does not tell."""
    ledger = Ledger(group.rank(), group.size(), lambda _, value: everyone(group, value))
    off: dict[tuple[str, str, str], float | None] = {}
    for name in ALGORITHMS:
        collective = Collective(group, name)
        for size, nbytes in SIZES.items():
            whole = torch.zeros(nbytes // 4)
            chunk = torch.zeros_like(split(whole, group.size())[group.rank()])
            calls = {
                "all_reduce": partial(collective.all_reduce, whole),
                "reduce_scatter": partial(collective.reduce_scatter, chunk, whole),
                "all_gather": partial(collective.all_gather, whole, chunk),
            }
            for op, call in calls.items():
                with ledger.count() as traffic:
                    call()
                predicted = BYTES[op](name, group.size(), nbytes, group.rank())
                mine = abs(traffic.wire_bytes - predicted) / predicted if traffic.wire_error is None else None
                ranks = everyone(group, mine)
                off[op, name, size] = None if None in ranks else max(ranks)
    return off


def everyone(group: dist.ProcessGroup, value: Any) -> list[Any]:
    """All ranks' values. Its bytes are not counted: the ledger calls it outside of its block."""
    values: list[Any] = [None] * group.size()
    dist.all_gather_object(values, value, group=group)
    return values


def main(world_size: int = 4) -> None:
    """A row an op and algorithm, a column a size."""
    off = on_ranks(world_size, measure)
    rows = []
    for op in BYTES:
        for name in ALGORITHMS:
            found = [off[op, name, size] for size in SIZES]
            held = "not measured" if None in found else "yes" if max(found) <= TARGET else "NO"
            rows.append(
                [op, name, *("-" if value is None else f"{value:.2%}" for value in found), f"{TARGET:.0%}", held]
            )
    print(table(["op", "algorithm", *SIZES, "at most", "held"], rows))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
