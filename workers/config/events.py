"""The events of LAB_FAULTS: what its entries leave out, a rank, and where there is a rate the moments, LAB_SEED draws.

The same on every rank, so that nobody has to tell another. Whoever needs another clock reads the same events.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

from workers.config.faults import Fault

MOST = 1000  # events of one rate


def planned(entries: Sequence[Fault], seed: int, world_size: int) -> list[Fault]:
    """The events of all entries that have a moment, each with a rank: the same on every rank."""
    events = []
    for index, entry in enumerate(entries):
        if entry.every_s is None:
            rank = _generator(seed, index).randrange(world_size) if entry.rank is None else entry.rank
            events.append(replace(entry, rank=rank, number=index))
    return events


def arrivals(entry: Fault, index: int, seed: int, world_size: int) -> Iterator[Fault]:
    """The events of an entry that comes again and again, without end: times between them are exponential, as of what
    happens independently."""
    assert entry.every_s is not None
    draw, at_s = _generator(seed, index), 0.0
    for count in range(MOST):
        at_s += draw.expovariate(1 / entry.every_s)
        rank = draw.randrange(world_size) if entry.rank is None else entry.rank
        yield replace(entry, rank=rank, at_s=at_s, every_s=None, number=index + MOST * (count + 1))


def _generator(seed: int, index: int) -> random.Random:
    return random.Random(f"{seed} {index}")
