"""What a run of precision has to claim, so that a check that vanishes is missed."""

from collections.abc import Iterator

from workers.config import Config
from workers.contract import Claims, Mode
from workers.passes.claims import measured

PROVEN_STEPS = 2


def claims(mode: Mode, config: Config) -> Iterator[Claims]:
    """Of all variants bytes; of those in 16 bits what a format allows, and of scaled ones what an overflow does."""
    in_16_bits = [name for name in mode.by_hand if name != "fp32"]
    yield from measured(mode, config, apart=in_16_bits)
    yield Claims(("called bytes", "wire bytes", "rest bytes", "peak bytes"), mode.by_hand)
    if not config.proof:
        return
    given = "given" if config.clip is None else "clipped gradients"
    yield Claims(("replicas",), mode.by_hand)
    yield Claims(("gradients",), in_16_bits, one=True, times=PROVEN_STEPS)
    yield Claims(("float64 gradients",), [name for name in in_16_bits if name != "fp16"], one=True, times=PROVEN_STEPS)
    yield Claims((given, "update"), in_16_bits, times=PROVEN_STEPS)
    yield Claims(("unscaled", "loss scale", "skipped", "clipped gradients", "weights"), ("fp16_scaled", "fp16_master"))
    yield Claims(("first masters",), ("bf16_master", "fp16_master"))
    yield Claims(("copied back",), ("bf16_master", "fp16_master"), times=PROVEN_STEPS)
    yield Claims(("rounded at random",), ("bf16_stochastic",))
