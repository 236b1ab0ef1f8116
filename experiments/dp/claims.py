"""What a run of data parallelism has to claim, so that a check that vanishes is missed."""

from collections.abc import Iterator

from workers.config import Config
from workers.contract import WHOLE_RUN, Claims, Mode
from workers.passes.claims import measured


def claims(mode: Mode, config: Config) -> Iterator[Claims]:
    """Of all variants by hand bytes, calls where they are foretold, and when their sums begin."""
    yield from measured(mode, config)
    if config.proof:
        yield Claims(("samples",), WHOLE_RUN, one=True)
        yield Claims(("replicas",), (*mode.by_hand, *mode.by_torch))
        if config.model == "line":
            yield Claims(("losses",), ("coordinator",), one=True)
    yield Claims(("called bytes", "wire bytes", "rest bytes", "peak bytes", "launched early"), mode.by_hand)
    yield Claims(("calls",), ("naive", "flat", "bucketed"))
    yield Claims(("launch order",), ("bucketed",))  # ring's too, but of buckets of fewer numbers than ranks
