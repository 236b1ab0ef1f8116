"""What a run of sharded training has to claim, so that a check that vanishes is missed."""

from collections.abc import Iterator

from workers.config import Config
from workers.contract import Claims, Mode
from workers.passes.claims import measured


def claims(mode: Mode, config: Config) -> Iterator[Claims]:
    """Of all variants by hand bytes and calls, and when weights are whole and gradients summed."""
    yield from measured(mode, config, copied=("zero1", "zero2"))  # which hold all weights
    yield Claims(("called bytes", "wire bytes", "rest bytes", "peak bytes", "calls", "scratch"), mode.by_hand)
    yield Claims(("whole units", "a layer at a time"), ("naive", "zero3", "zero3_kept"))
    if config.world_size > 1:
        yield Claims(("sums",), mode.by_hand)
