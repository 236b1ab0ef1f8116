"""What a run of compression has to claim, so that a check that vanishes is missed."""

from collections.abc import Iterator

from experiments.compress.predictions import METHODS, own
from workers.config import Config
from workers.contract import Claims, Mode
from workers.passes.claims import measured

BESIDE = ("ddp_fp16", "ddp_powersgd")  # PyTorch's hooks, which are held beside ours


def claims(mode: Mode, config: Config) -> Iterator[Claims]:
    """Of all variants by hand bytes and calls; of those that compress what their method promises."""
    lossy = [name for name in mode.by_hand if name != "dense"]
    yield from measured(mode, config, apart=(*lossy, *BESIDE))
    yield Claims(("called bytes", "wire bytes", "rest bytes", "peak bytes", "calls"), mode.by_hand)
    if not config.proof:
        return
    yield Claims(("replicas",), (*mode.by_hand, *mode.by_torch))
    yield Claims(("gradients", "formula", "weights"), lossy, one=True)
    yield Claims(("limit",), lossy)
    yield Claims(("range",), ("bf16", "fp16"))
    yield Claims(("drawn",), ("int8", "randomk"))
    yield Claims(("rank",), ("powersgd", "powersgd_plain"), one=True)
    yield Claims(("losses beside ours", "gradients beside ours"), BESIDE)
    if own(config).error_feedback:
        yield Claims(("sent + residual",), METHODS, one=True)
        yield Claims(("residuals",), METHODS)
