"""What a run of several axes has to claim, so that a check that vanishes is missed."""

from collections.abc import Iterator

from workers.config import Config
from workers.contract import Claims, Mode
from workers.passes.claims import measured


def claims(mode: Mode, config: Config) -> Iterator[Claims]:
    """Of all variants by hand bytes, calls, and the order of passes with what comes of it."""
    sizes = mode.axes(config)
    copied = ("naive", "gpipe", "1f1b") if sizes["dp"] > 1 else ()
    yield from measured(mode, config, copied=copied)
    if config.proof:
        yield Claims(("in flight",), mode.by_hand)
    yield Claims(("called bytes", "wire bytes", "rest bytes", "peak bytes", "calls"), mode.by_hand)
    yield Claims(("schedule", "bubble on paper", "gradients first"), mode.by_hand)
    along = [axis for axis, ranks in sizes.items() if axis != "cp" and ranks > 1]
    if sizes["cp"] == 1:  # else gradients go over two axes at once
        yield Claims([f"{kind} bytes over {axis}" for kind in ("called", "wire") for axis in along], mode.by_hand)
    if sizes["dp"] > 1:
        yield Claims(("overlap",), [name for name in mode.by_hand if not name.startswith("zero")])
