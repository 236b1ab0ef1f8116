"""What one collective costs at one size: the slowest rank's seconds a call, and the bytes that a rank sends."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from workers.measure.formulas import collectives as formulas

KIB, MIB = 1 << 10, 1 << 20
BYTES: dict[str, Callable[[str, int, int, int], float]] = {
    "all_reduce": formulas.all_reduce_bytes,
    "reduce_scatter": formulas.reduce_scatter_bytes,
    "all_gather": formulas.all_gather_bytes,
}


@dataclass
class Cost:
    """One operation by one variant at one size: the slowest rank's seconds a call, and the bytes that this rank
    sent."""

    rounds_s: list[float] = field(default_factory=list)
    own_s: list[float] = field(default_factory=list)  # of the same rounds, on this rank
    wire_bytes: float | None = None
    off: float = 0.0  # the largest difference that any call left

    @property
    def seconds(self) -> float:
        """The median round."""
        return statistics.median(self.rounds_s)


Costs = dict[tuple[str, int, str], Cost]  # by operation, bytes, variant


class Told(NamedTuple):
    """What the sweep says of one operation: the rows of its table, and its busbw by variant, [MB] and [GB/s]."""

    rows: list[list[object]]
    busbw: dict[str, list[list[float]]]


def size(nbytes: int) -> str:
    """1024 as "1 KiB"."""
    if nbytes < KIB:
        return f"{nbytes} B"
    return f"{nbytes // KIB} KiB" if nbytes < MIB else f"{nbytes // MIB} MiB"


def even(nbytes: int, world_size: int) -> int:
    """The next smaller size of which every rank has an equal chunk of whole floats, as gloo's reduce_scatter wants; at
    the least one each."""
    return max(nbytes - nbytes % (4 * world_size), 4 * world_size)
