"""What a run of pipelines has to claim, so that a check that vanishes is missed."""

from collections.abc import Iterator

from workers.config import Config
from workers.contract import Claims, Mode
from workers.passes.claims import measured


def claims(mode: Mode, config: Config) -> Iterator[Claims]:
    """Of all variants by hand bytes, calls, and the order of passes with what comes of it."""
    yield from measured(mode, config)
    if config.proof:
        yield Claims(("in flight",), mode.by_hand)
    yield Claims(
        ("called bytes", "wire bytes", "calls", "schedule", "bubble on paper", "activation bytes"), mode.by_hand
    )
    yield Claims(("rest bytes", "messages"), mode.by_hand)
    if config.backend != "nccl":
        yield Claims(("posted ahead",), [name for name in mode.by_hand if name != "naive"])
