"""float32 weights behind 16-bit ones: what computes is small, what is stepped is exact.

A weight of 1 in bf16 has its next neighbour at 1 + 2^-7: an update of a thousandth is rounded away, at this step and at
all that follow. Master weights in float32 add up what 16 bits cannot see, and the weights that compute are their
rounded copies, made anew after each step (Micikevicius et al. 2018, section 3.1). It costs 4 bytes a parameter. Without
`kept` the float32 copies live for the update alone: then gradients can be unscaled and the update computed in float32,
but its result is rounded to 16 bits every time.
"""

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn


class Masters:
    """The optimizer steps `parameters` (float32); `computing` (16 bits, in the same order) are their copies.

    Args:
        computing: the model's parameters, with their summed gradients.
        exact: the weights before they were rounded, float32.
        kept: whether the float32 weights outlive a step.
    """

    def __init__(self, computing: Sequence[nn.Parameter], exact: Sequence[Tensor], *, kept: bool) -> None:
        self.computing, self.kept = list(computing), kept
        self.parameters = [nn.Parameter(each if kept else each.new_empty(0)) for each in exact]

    @torch.no_grad()
    def deliver(self, scale: float) -> None:
        """Give every master its gradient in float32, divided by the `scale` of the loss: in 16 bits it would underflow
        again."""
        for weight, master in zip(self.computing, self.parameters, strict=True):
            if not self.kept:
                master.data = weight.detach().float()
            if weight.grad is not None:
                master.grad = weight.grad.float().div_(scale)

    @torch.no_grad()
    def refresh(self) -> None:
        """Round the stepped masters into the weights, and let go of what is not kept."""
        for weight, master in zip(self.computing, self.parameters, strict=True):
            weight.copy_(master)  # to the nearest
            master.grad = None
            if not self.kept:
                master.data = master.new_empty(0)


# Dynamic loss scaling: gradients that fp16 would round to zero are made larger, and made small again where there is
# room.
#
# fp16 ends at 2^-24, and gradients do not care. A loss that is multiplied by S has gradients S times as large, so
# that they pass through the backward pass, and are divided by S in float32 (Micikevicius et al. 2018, section 3.2). S
# is a power of two, so that nothing is rounded by it. It has to be as large as can be without an overflow, and nobody
# knows how large that is: so it is halved after a step with an inf or a NaN in it, whose update is skipped, and
# doubled after 2000 good ones.

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
    return all(bool(gradient.isfinite().all()) for gradient in gradients)


def ulp(values: Tensor, dtype: torch.dtype) -> Tensor:
    """The distance of neighbouring numbers of `dtype` at each of `values`, a unit in the last place, in float64."""
    limits = torch.finfo(dtype)
    _, exponents = torch.frexp(values.double().abs().clamp(min=limits.smallest_normal))  # |value| in [2^(e-1), 2^e)
    ones = torch.ones(values.shape, dtype=torch.float64, device=values.device)
    return torch.ldexp(ones, exponents - 1 + round(math.log2(limits.eps)))
