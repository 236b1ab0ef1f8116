"""Dynamic loss scaling: gradients that fp16 would round to zero are made larger, and made small again where there is
room.

fp16 ends at 2^-24, and gradients do not care. A loss that is multiplied by S has gradients S times as large, so that
they pass through the backward pass, and are divided by S in float32 (Micikevicius et al. 2018, section 3.2). S is a
power of two, so that nothing is rounded by it. It has to be as large as can be without an overflow, and nobody knows
how large that is: so it is halved after a step with an inf or a NaN in it, whose update is skipped, and doubled after
2000 good ones.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

LARGEST = torch.finfo(torch.float32).max  # a scale is a float32 in torch, which does not grow it past that either


class LossScale:
    """The scale S and its rule, with the defaults and the semantics of torch.amp.GradScaler.

    Ranks agree on an overflow without a message of its own: their gradients are summed, and an inf on one is an inf or
    a NaN in the sum.
    """

    def __init__(self, value: float = 65536.0, growth: float = 2.0, backoff: float = 0.5, interval: int = 2000) -> None:
        self.value, self.growth, self.backoff, self.interval = value, growth, backoff, interval
        self.good_steps = 0  # in a row, since the scale last changed

    def adjust(self, *, overflowed: bool) -> None:
        """After each step, whether it was taken or skipped."""
        if overflowed:
            self.value *= self.backoff
            self.good_steps = 0
            return
        self.good_steps += 1
        if self.good_steps == self.interval:
            self.value = self.value * self.growth if self.value * self.growth <= LARGEST else self.value
            self.good_steps = 0


def all_finite(gradients: Iterable[Tensor]) -> bool:
    """Whether there is neither an inf nor a NaN."""
    return all(bool(gradient.isfinite().all()) for gradient in gradients)
