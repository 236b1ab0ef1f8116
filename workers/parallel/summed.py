"""Gradients, summed as they come: a unit's sum is begun when its last gradient is there, while the backward pass goes on.

Each rank gets its chunk of the sum, and the rest can go. Of the sums only `MAX_IN_FLIGHT` are under way: with no bound ZeRO-2
would hold all gradients at once, and peak above ZeRO-1.
"""

from collections import deque
from typing import NamedTuple

from torch import Tensor

from workers.parallel.collectives import Collective
from workers.parallel.flat import FlatUnit
from workers.parallel.peers import Pending
from workers.parallel.phases import phase

MAX_IN_FLIGHT = 1


class Sum(NamedTuple):
    """A unit's gradients on their way: what arrives, and what has to stay until it has."""

    unit: FlatUnit
    output: Tensor  # [c]
    flat: Tensor  # [N·c]
    pending: Pending


class Summed:
    """The sums of a step; all ranks begin the same ones in the same order."""

    def __init__(self, collective: Collective) -> None:
        self.collective = collective
        self.under_way: deque[Sum] = deque()

    def begin(self, unit: FlatUnit, flat: Tensor, *, in_place: bool) -> None:
        """Begin to sum the unit's `flat` gradients [N·c]; this rank's chunk of the sum is left in their place, or beside them."""
        while len(self.under_way) >= MAX_IN_FLIGHT:
            self.settle()
        output = flat[unit.rank * unit.chunk :][: unit.chunk] if in_place else flat.new_empty(unit.chunk)
        with phase("reduce_scatter"):
            pending = self.collective.reduce_scatter(output, flat, async_op=True)
        self.under_way.append(Sum(unit, output, flat, pending))

    def settle(self) -> None:
        """Wait for the oldest sum, and add it to what earlier microbatches left."""
        unit, output, _, pending = self.under_way.popleft()
        with phase("wait"):
            pending.wait()
        arrived = output[: unit.length]
        unit.gradient = arrived if unit.gradient is None else unit.gradient.add_(arrived)

    def finish(self) -> None:
        """Wait for all that are under way."""
        while self.under_way:
            self.settle()
