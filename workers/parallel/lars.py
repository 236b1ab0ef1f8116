"""LARS: momentum SGD whose every layer moves by a share of its own size (You et al. 2017, algorithm 1).

    λ = η·‖w‖ / (‖g‖ + β·‖w‖)        the layer's rate, η the trust coefficient, β the weight decay
    v = μ·v + γ·λ·(g + β·w)           γ the learning rate, μ the momentum
    w = w - v

The denominator is the sum of two norms, not ‖g + βw‖: decay pulls along w, and where it points against the gradient the
norm of the sum would nearly vanish and the rate jump. Where a norm is zero the ratio ‖w‖ / (‖g‖ + β‖w‖) is taken as 1,
and λ = η, the factor that all other layers carry: with ‖w‖ = 0 the formula would hold a fresh layer at zero for ever,
and a bare 1 would let it run 1/η times as fast as the rest. With ‖g‖ = 0 only decay is left, at that same rate.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from workers.parallel.layerwise import Group, Layerwise


class Lars(Layerwise):
    """See `Layerwise` for `groups`, `lr` (γ) and `sharded_over`; `trust` is η. Its state is "momentum", shaped like the
    weight."""

    def __init__(
        self, groups: list[Group], lr: float, *, momentum: float = 0.9, trust: float = 0.001,
        sharded_over: dist.ProcessGroup | None = None,
    ) -> None:  # fmt: skip
        super().__init__(groups, lr, sharded_over)
        self.momentum, self.trust = momentum, trust

    def update(self, parameters: list[Tensor], group: Group) -> None:
        """v and w of one group."""
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        rates: Sequence[Tensor | float] = [1.0] * len(parameters)
        if group["adapted"]:
            rates = self.rates(parameters, gradients, group["weight_decay"])
        for parameter, gradient, rate in zip(parameters, gradients, rates, strict=True):
            state = self.state[parameter]
            if not state:
                state["momentum"] = torch.zeros_like(parameter)
            decayed = gradient.add(parameter, alpha=group["weight_decay"])
            state["momentum"].mul_(self.momentum).add_(decayed * rate, alpha=group["lr"])
            parameter.sub_(state["momentum"])

    def rates(self, weights: list[Tensor], gradients: list[Tensor], decay: float) -> tuple[Tensor, ...]:
        """λ of each layer, scalars."""
        w, g = self.norms(weights, gradients)
        ratios = torch.where((w > 0) & (g > 0), w / (g + decay * w), 1.0)
        return (self.trust * ratios).unbind()
