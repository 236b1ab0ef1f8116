"""What a run of context parallelism has to claim, so that a check that vanishes is missed."""

from collections.abc import Iterator

from workers.config import Config
from workers.contract import Claims, Mode
from workers.passes.claims import measured


def claims(mode: Mode, config: Config) -> Iterator[Claims]:
    """Of all variants by hand bytes and calls, what they keep, and on a CPU who attends to how much."""
    yield from measured(mode, config)
    yield Claims(("called bytes", "wire bytes", "rest bytes", "calls"), mode.by_hand)
    yield Claims(("activation bytes", "activations by length"), mode.by_hand)
    if config.device == "cpu" and config.backend != "nccl":  # whose ranks are on cards
        yield Claims(("attention pairs",), mode.by_hand)
        yield Claims(("balance",), mode.by_hand, one=True)
        yield Claims(("keys ahead",), ("ring", "zigzag", "shift"))
