"""Whole weights, just in time: a unit is unsharded when its layer is about to compute, and resharded when it has.

A gather that is begun one layer ahead costs no waiting where the link is free while the cores compute; one further
ahead would hold one layer more (`LAB_RESHARD=0` holds them all). ZeRO-1 and -2 keep their weights, and gather them
after each step.
"""

from collections.abc import Sequence

from workers.parallel.collectives import Collective
from workers.parallel.flat import FlatUnit
from workers.parallel.peers import Pending
from workers.parallel.phases import phase


class Unshard:
    """The whole weights of `units`, of which every rank has a chunk; all ranks make the same calls in the same
    order."""

    def __init__(self, units: Sequence[FlatUnit], collective: Collective) -> None:
        self.units, self.collective = units, collective
        self.there = [False] * len(units)  # or on its way
        self._pending: dict[int, Pending] = {}

    def need(self, index: int) -> None:
        """Return once the weights of unit `index` are whole."""
        self.begin(index)
        pending = self._pending.pop(index, None)
        if pending is not None:
            with phase("wait"):
                pending.wait()

    def begin(self, index: int) -> None:
        """Begin to gather the unit, if it is not there yet."""
        if self.there[index]:
            return
        unit = self.units[index]
        with phase("all_gather"):
            local = unit.local.to(unit.whole.device)
            self._pending[index] = self.collective.all_gather(unit.materialize(), local, async_op=True)
        self.there[index] = True

    def reshard(self, index: int) -> None:
        """Let the unit's weights go; this rank's chunk stays."""
        self.units[index].free()
        self.there[index] = False

    def again(self) -> None:
        """Gather all units, which have kept their memory, at once."""
        with phase("all_gather"):
            pending = [self.collective.all_gather(unit.whole, unit.local, async_op=True) for unit in self.units]
        with phase("wait"):
            for each in pending:
                each.wait()
