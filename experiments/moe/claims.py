"""What a run of expert parallelism has to claim, so that a check that vanishes is missed."""

from collections.abc import Iterator

from workers.config import Config
from workers.contract import Claims, Mode
from workers.passes.claims import measured


def claims(mode: Mode, config: Config) -> Iterator[Claims]:
    """Of all variants by hand bytes, calls, when their sums begin, and what experts took; of copies that they agree."""
    yield from measured(mode, config)
    yield Claims(("called bytes", "wire bytes", "rest bytes", "calls", "launched early"), mode.by_hand)
    if config.resume is None:  # else there may be no step left
        yield Claims(("capacity", "choices"), (*mode.by_hand, *mode.by_torch))
    if config.proof:
        yield Claims(("copies",), ("ep_dp", "ep_dp_tp"), one=True)
