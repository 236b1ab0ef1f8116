"""float32 weights behind 16-bit ones: what computes is small, what is stepped is exact.

A weight of 1 in bf16 has its next neighbour at 1 + 2^-7: an update of a thousandth is rounded away, at this step and at
all that follow. Master weights in float32 add up what 16 bits cannot see, and the weights that compute are their
rounded copies, made anew after each step (Micikevicius et al. 2018, section 3.1). It costs 4 bytes a parameter. Without
`kept` the float32 copies live for the update alone: then gradients can be unscaled and the update computed in float32,
but its result is rounded to 16 bits every time.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

Round = Callable[[Tensor], Tensor]  # float32 to 16 bits


class Masters:
    """The optimizer steps `parameters` (float32); `computing` (16 bits, in the same order) are their copies.

    Args:
        computing: the model's parameters, with their summed gradients.
        exact: the weights before they were rounded, float32.
        kept: whether the float32 weights outlive a step.
        rounded: how they become 16-bit ones; by default to the nearest.
    """

    def __init__(
        self, computing: Sequence[nn.Parameter], exact: Sequence[Tensor], *, kept: bool, rounded: Round | None = None
    ) -> None:
        self.computing, self.kept = list(computing), kept
        self.rounded = rounded or (lambda master: master)  # a copy into 16 bits rounds to the nearest by itself
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
            weight.copy_(self.rounded(master))
            master.grad = None
            if not self.kept:
                master.data = master.new_empty(0)
