"""The classic mistake of a scaled loss, made on purpose by LAB_BUG, with the check that has to see it."""

from torch import nn

from distlab.contract import Mistakes, Needs
from distlab.precision.mixed_precision import Masters

from .predictions import SCALED

mistake = Mistakes()


# --- the settings that hide one ---


# --- the mistakes ---


@mistake("unscaled_clip", check="clipped gradients", part="deliver", of=SCALED, needs=Needs(ranks=1))
def clip_then_unscale(masters: Masters, scale: float, bound: float | None) -> None:
    """Gradients are clipped while they still carry the scale of the loss: their norm is 65536 times too large, so
    that what is left after unscaling is far too small."""
    if bound is not None:
        nn.utils.clip_grad_norm_(masters.computing, bound)
    masters.deliver(scale)
