"""What a run of tensor parallelism has to claim, so that a check that vanishes is missed."""

from collections.abc import Iterator

from workers.config import Config
from workers.contract import Claims, Mode
from workers.passes.claims import measured
from workers.workload.own import is_own


def claims(mode: Mode, config: Config) -> Iterator[Claims]:
    """Of all variants by hand bytes, and the calls in their order."""
    yield from measured(mode, config, copied=mode.by_hand)
    if config.proof:
        yield Claims(("replicas",), (*mode.by_hand, *mode.by_torch))
    yield Claims(("called bytes", "wire bytes", "calls", "order of calls"), mode.by_hand)
    if is_own(config.model):
        yield Claims(("rest bytes",), mode.by_hand)
        if config.proof:
            yield Claims(("between the slices",), ("megatron",), one=True)
    elif not config.variant:
        yield Claims(("activation bytes",), ("sequence",))
