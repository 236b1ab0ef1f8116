"""LAMB: Adam whose every layer moves by a share of its own size (You et al. 2020, algorithm 2).

    m = β1·m + (1-β1)·g        v = β2·v + (1-β2)·g²        m̂ = m/(1-β1^t)        v̂ = v/(1-β2^t)
    r = m̂ / (√v̂ + ε)
    w = w - γ·φ(‖w‖)/‖r + λw‖·(r + λw)        γ the learning rate, λ the weight decay, φ(z) = min(max(z, low), high)

φ keeps a layer whose weights have grown from taking ever longer steps. Where a norm is zero the ratio is 1, and the
layer takes Adam's step: with φ(‖w‖) = 0 a fresh layer would never leave zero, and with ‖r + λw‖ = 0 there is nothing to
scale.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from workers.parallel.layerwise import Group, Layerwise


class Lamb(Layerwise):
    """See `Layerwise` for `groups`, `lr` (γ) and `sharded_over`; `bounds` are those of φ. Its state is "m", "v" and
    "step"."""

    def __init__(
        self, groups: list[Group], lr: float, *, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-6,
        bounds: tuple[float, float] = (0.0, 10.0), sharded_over: dist.ProcessGroup | None = None,
    ) -> None:  # fmt: skip
        super().__init__(groups, lr, sharded_over)
        self.betas, self.eps, self.bounds = betas, eps, bounds

    def update(self, parameters: list[Tensor], group: Group) -> None:
        """m, v and w of one group."""
        steps = [self.adam(parameter).add_(parameter, alpha=group["weight_decay"]) for parameter in parameters]
        ratios: Sequence[Tensor | float] = (
            self.ratios(parameters, steps) if group["adapted"] else [1.0] * len(parameters)
        )
        for parameter, step, ratio in zip(parameters, steps, ratios, strict=True):
            parameter.sub_(step * ratio, alpha=group["lr"])

    def adam(self, parameter: Tensor) -> Tensor:
        """r, of moments without the bias towards their zero beginning."""
        assert parameter.grad is not None
        state = self.state[parameter]
        if not state:
            state |= {"m": torch.zeros_like(parameter), "v": torch.zeros_like(parameter), "step": 0}
        (first, second), gradient = self.betas, parameter.grad
        state["step"] += 1
        state["m"].mul_(first).add_(gradient, alpha=1 - first)
        state["v"].mul_(second).addcmul_(gradient, gradient, value=1 - second)
        m: Tensor = state["m"] / (1 - first ** state["step"])
        v: Tensor = state["v"] / (1 - second ** state["step"])
        return m.div_(v.sqrt_().add_(self.eps))

    def ratios(self, weights: list[Tensor], steps: list[Tensor]) -> tuple[Tensor, ...]:
        """φ(‖w‖)/‖r + λw‖ of each layer, scalars."""
        w, u = self.norms(weights, steps)
        return torch.where((w > 0) & (u > 0), w.clamp(*self.bounds) / u, 1.0).unbind()
