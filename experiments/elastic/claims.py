"""What a run whose ranks come and go has to claim, so that a check that vanishes is missed."""

from collections.abc import Iterator

from workers.config import Config
from workers.contract import Claims, Mode

SHARDED = ("zero1", "peer_memory")


def claims(mode: Mode, config: Config, losses: int) -> Iterator[Claims]:
    """Of all variants bytes before the first of `losses`, and by whoever is left that each is as one process."""
    chosen = mode.names
    yield Claims(("called bytes",), chosen)
    if config.world_size > 1:
        yield Claims(("wire bytes",), chosen)
    yield Claims(("moments held",), SHARDED)
    yield Claims(("updates kept",), [name for name in chosen if name != "restart"])
    yield Claims(("weights", "losses", "samples", "record", "replicas"), chosen, one=True)
    yield Claims(("from memory",), SHARDED, one=True)
    yield Claims(("copies",), ("peer_memory",), one=True)
    if config.optimizer == "adamw":
        yield Claims(("optimizer",), chosen, one=True)
    if losses < config.world_size - 1:  # else nobody may be there from begin to end
        yield Claims(("redone",), chosen, one=True)
        if config.audit_every == 1:
            yield Claims(("audited replicas",), chosen, one=True)
