"""Gradients, summed as they come: a unit's sum is begun when its last gradient is there, while the backward pass goes
on.

Each rank gets its chunk of the sum, and the rest can go. How many are held at once is the whole point: with no bound
ZeRO-2 would hold all gradients, and peak above ZeRO-1. One sum is under way at a time; where it moves without the
processor's help (NCCL) the next unit's gradients are collected meanwhile. Over gloo the ranks' cores do the sending:
there a second vector costs memory, 5 % of the peak that `python -m benchmarks.fsdp` prints for 4 ranks.
"""

from typing import NamedTuple

from torch import Tensor

from workers.parallel.collectives import Collective
from workers.parallel.flat import FlatUnit
from workers.parallel.peers import Pending
from workers.parallel.phases import phase


class Sum(NamedTuple):
    """A unit's gradients on their way."""

    unit: FlatUnit
    flat: Tensor  # [N·c], this rank's chunk of it becomes the sum
    keeps_flat: bool
    pending: Pending


class Summed:
    """The sums of a step; all ranks begin the same ones in the same order."""

    def __init__(self, collective: Collective) -> None:
        self.collective = collective
        self.under_way: Sum | None = None

    def make_room(self) -> None:
        """Before another unit's gradients are collected."""
        if not self.collective.peers.batched:
            self.finish()

    def begin(self, unit: FlatUnit, flat: Tensor, *, keeps_flat: bool) -> None:
        """Begin to sum the unit's `flat` gradients [N·c]; `keeps_flat`: the vector stays, and with it this rank's
        part."""
        self.finish()
        own = flat[unit.rank * unit.chunk :][: unit.chunk]
        with phase("reduce_scatter"):
            pending = self.collective.reduce_scatter(own, flat, async_op=True)
        self.under_way = Sum(unit, flat, keeps_flat, pending)

    def finish(self) -> None:
        """Wait for what is under way, and add it to what earlier microbatches left."""
        if self.under_way is None:
            return
        (unit, flat, keeps_flat, pending), self.under_way = self.under_way, None
        with phase("wait"):
            pending.wait()
        unit.add_gradient(flat[unit.rank * unit.chunk :][: unit.length], keeps=keeps_flat)
        self.collective.peers.release()  # (N-1)/N of a unit, which would stand beside the weights of the next one
