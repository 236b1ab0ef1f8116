"""Mixed precision: the model computes with 16-bit weights, and the optimizer updates float32 copies.

The next bf16 number after 1 is 1 + 2^-7: an update of a thousandth is rounded away, at this step and at all later ones.
Master weights in float32 accumulate such small updates, and the weights of the model are their rounded copies, renewed
after each step (Micikevicius et al. 2018, section 3.1). They cost 4 bytes per parameter. Without `persistent` the
float32 copies exist during the update only: gradients are unscaled and the update is computed in float32, but the
result is rounded to 16 bits every time.
"""

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn


class Masters:
    """The float32 `parameters` that the optimizer steps; `computing` (16 bits, same order) are their rounded copies.

    Args:
        computing: the model's parameters, with their summed gradients.
        exact: the weights before they were rounded, float32.
        kept: whether the float32 weights outlive a step.
    """

    def __init__(self, computing: Sequence[nn.Parameter], exact: Sequence[Tensor], *, persistent: bool) -> None:
        self.computing, self.persistent = list(computing), persistent
        self.parameters = [nn.Parameter(each if persistent else each.new_empty(0)) for each in exact]

    @torch.no_grad()
    def deliver(self, scale: float) -> None:
        """Copy every gradient to its master in float32, divided by the loss `scale`: in 16 bits it would underflow
        again."""
        for weight, master in zip(self.computing, self.parameters, strict=True):
            if not self.persistent:
                master.data = weight.detach().float()
            if weight.grad is not None:
                master.grad = weight.grad.float().div_(scale)

    @torch.no_grad()
    def refresh(self) -> None:
        """Round the updated masters into the model's weights, and free the masters unless they are kept."""
        for weight, master in zip(self.computing, self.parameters, strict=True):
            weight.copy_(master)  # rounds to nearest
            master.grad = None
            if not self.persistent:
                master.data = master.new_empty(0)


# Dynamic loss scaling: gradients that fp16 would round to zero are scaled up before the backward pass and down after
# it.
#
# The smallest fp16 number is 2^-24, and gradients are often smaller. A loss multiplied by S has gradients S times as
# large, which survive the backward pass and are divided by S in float32 (Micikevicius et al. 2018, section 3.2). S is a
# power of two, so scaling rounds nothing. It has to be as large as possible without an overflow, and that limit is not
# known in advance: S is halved after a step with an inf or a NaN, whose update is skipped, and doubled after 2000 good
# steps.

LARGEST = torch.finfo(torch.float32).max  # scales are float32 in torch, which does not grow them further either


class LossScale:
    """The scale S and its rule, with the defaults and the semantics of torch.amp.GradScaler.

    Ranks agree on an overflow without an extra message: gradients are summed, so an inf on one rank is an inf or a NaN
    in everyone's sum.
    """

    def __init__(self, value: float = 65536.0, growth: float = 2.0, backoff: float = 0.5, interval: int = 2000) -> None:
        self.value, self.growth, self.backoff, self.interval = value, growth, backoff, interval
        self.good_steps = 0  # consecutive ones since the scale last changed

    def adjust(self, *, overflowed: bool) -> None:
        """Update the scale after each step, whether it was taken or skipped."""
        if overflowed:
            self.value *= self.backoff
            self.good_steps = 0
            return
        self.good_steps += 1
        if self.good_steps == self.interval:
            self.value = self.value * self.growth if self.value * self.growth <= LARGEST else self.value
            self.good_steps = 0


def all_finite(gradients: Iterable[Tensor]) -> bool:
    return all(bool(gradient.isfinite().all()) for gradient in gradients)


def ulp(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the spacing of `dtype` at each of `values` (a unit in the last place), in float64."""
    limits = torch.finfo(dtype)
    _, exponents = torch.frexp(values.double().abs().clamp(min=limits.smallest_normal))  # |value| in [2^(e-1), 2^e)
    ones = torch.ones(values.shape, dtype=torch.float64, device=values.device)
    return torch.ldexp(ones, exponents - 1 + round(math.log2(limits.eps)))
