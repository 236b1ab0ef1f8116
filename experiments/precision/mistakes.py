"""The classic mistake of a scaled loss, made on purpose by LAB_BUG, with the check that has to see it."""

from torch import nn

from experiments.precision.predictions import SCALED
from workers.contract import Instead, Mistake, Needs
from workers.parallel.masters import Masters


def clip_then_unscale(masters: Masters, scale: float, bound: float | None) -> None:
    """Clips what still carries the scale."""
    if bound is not None:
        nn.utils.clip_grad_norm_(masters.computing, bound)
    masters.deliver(scale)


MISTAKES = {
    "unscaled_clip": Mistake(
        "gradients are clipped while they still carry the scale of the loss: their norm is 65536 times too large, so "
        "that what is left after unscaling is far too small",
        "clipped gradients",
        Instead(SCALED, {"deliver": clip_then_unscale}),
        Needs(ranks=1),
    )
}
