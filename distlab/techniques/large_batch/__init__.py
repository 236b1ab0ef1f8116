"""LARS: momentum SGD in which every layer's update is proportional to the layer's norm (You et al. 2017, algorithm 1).

    λ = η·‖w‖ / (‖g‖ + β·‖w‖)        the layer's rate, η the trust coefficient, β the weight decay
    v = μ·v + γ·λ·(g + β·w)           γ the learning rate, μ the momentum
    w = w - v

The denominator is the sum of two norms, not ‖g + βw‖: decay points along w, and where it opposes the gradient that norm
would nearly vanish and the rate jump. Where a norm is zero the ratio ‖w‖ / (‖g‖ + β‖w‖) is taken as 1, so λ = η, the
factor of all other layers: with ‖w‖ = 0 the formula would keep a fresh layer at zero for ever, and λ = 1 would make it
1/η times as fast as the rest. With ‖g‖ = 0 only decay is left, at the same rate.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# Per-layer learning rates: the part that LARS and LAMB share.
#
# A large batch means few steps, so each has to be long, and a single rate is bounded by the layer whose weights are
# smallest relative to their gradients. A layer-wise optimizer scales each weight's update by a ratio of two norms, so
# that every layer changes by about the same fraction of its norm (You et al. 2017, section 4).
#
# Biases and the gains of norms get no ratio and no weight decay: a bias begins at zero, and any fraction of zero is no
# step at all. A norm is that of the whole weight. Where ranks have parts of it, the squares of all parts are summed
# over them, in one call for all norms of a step; with the norms of its parts alone every rank would get another ratio.

# Of parameters: {"params": [...], "lr": ..., "weight_decay": ..., "adapted": whether a ratio scales it}.
Group = dict[str, Any]


def split_by_decay(parameters: Iterable[Tensor], weight_decay: float) -> list[Group]:
    """Return two groups: matrices, which get a ratio and decay, and vectors (biases, gains), which get neither."""
    trained = list(parameters)
    matrices, vectors = [each for each in trained if each.dim() > 1], [each for each in trained if each.dim() <= 1]
    return [
        {"params": matrices, "weight_decay": weight_decay, "adapted": True},
        {"params": vectors, "weight_decay": 0.0, "adapted": False},
    ]


class Layerwise:
    """An optimizer of parameter groups, like those of torch; a subclass defines the update of a group.

    Args: groups: as `split_by_decay` returns them. Where weights are sharded, every rank lists its parts of the same
    weights. lr: the rate of groups without a rate. sharded_over: the ranks that have parts of the weights; None where
    each has them whole.
    """

    def __init__(self, groups: list[Group], lr: float, sharded_over: dist.ProcessGroup | None = None) -> None:
        self.param_groups: list[Group] = [{"lr": lr} | group for group in groups]
        self.sharded_over = sharded_over
        self.state: dict[Tensor, dict[str, Any]] = defaultdict(dict)

    @torch.no_grad()
    def step(self) -> None:
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            trained = [parameter for parameter in group["params"] if parameter.grad is not None]
            if trained:
                self.update(trained, group)

    def update(self, parameters: list[Tensor], group: Group) -> None:
        """Update the `parameters` of one group from their gradients."""
        raise NotImplementedError

    def norms(self, *lists: list[Tensor]) -> list[Tensor]:
        """Return the norms of each list of tensors as a vector, all in a single all_reduce; they stay on the device, so
        no step waits for them."""
        tensors = [tensor for part in lists for tensor in part]
        norms = torch.stack([torch.linalg.vector_norm(tensor) for tensor in tensors])
        if self.sharded_over is not None:
            squares = norms.square()
            dist.all_reduce(squares, group=self.sharded_over)
            norms = squares.sqrt()
        return list(norms.split([len(part) for part in lists]))


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
        """Update v and w of one group."""
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
        """Return λ of each layer, scalars."""
        w, g = self.norms(weights, gradients)
        ratios = torch.where((w > 0) & (g > 0), w / (g + decay * w), 1.0)
        return (self.trust * ratios).unbind()


# LAMB: Adam in which every layer's update is proportional to the layer's norm (You et al. 2020, algorithm 2).
#
#     m = β1·m + (1-β1)·g        v = β2·v + (1-β2)·g²        m̂ = m/(1-β1^t)        v̂ = v/(1-β2^t)
#     r = m̂ / (√v̂ + ε)
#     w = w - γ·φ(‖w‖)/‖r + λw‖·(r + λw)        γ the learning rate, λ the weight decay, φ(z) = min(max(z, low), high)
#
# φ bounds the steps of a layer whose weights have grown. Where a norm is zero the ratio is 1, and the layer takes
# Adam's step: with φ(‖w‖) = 0 a fresh layer would stay zero for ever, and with ‖r + λw‖ = 0 there is nothing to scale.


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
        """Update m, v and w of one group."""
        steps = [self.adam(parameter).add_(parameter, alpha=group["weight_decay"]) for parameter in parameters]
        ratios: Sequence[Tensor | float] = [1.0] * len(parameters)
        if group["adapted"]:
            ratios = self.ratios(parameters, steps)
        for parameter, step, ratio in zip(parameters, steps, ratios, strict=True):
            parameter.sub_(step * ratio, alpha=group["lr"])

    def adam(self, parameter: Tensor) -> Tensor:
        """Return r, from moments with bias correction."""
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
        """Return φ(‖w‖)/‖r + λw‖ of each layer, scalars."""
        w, u = self.norms(weights, steps)
        return torch.where((w > 0) & (u > 0), w.clamp(*self.bounds) / u, 1.0).unbind()


# Learning rates for a batch of k times the base: pure functions of k and the step, as factors of the base rate.
#
#     unscaled    1           the same learning rate for k times fewer steps: slow
#     sqrt        √k          keeps the variance of an update: k times the samples have 1/k of the noise
#                             (Krizhevsky 2014, section 5)
#     linear      k           k steps of η along nearly equal gradients are one step of kη
#                             (Goyal et al. 2017, section 2.1)
#     warmup      1 to k      linear, reached in equal increments, since early gradients are not nearly equal
#                             (section 2.2)
#
# Each parameter group keeps its own base rate and is scaled by the factor: one rate for all groups would undo them.


def unscaled(k: float) -> float:  # noqa: ARG001
    return 1.0


def sqrt(k: float) -> float:
    return math.sqrt(k)


def linear(k: float) -> float:
    return float(k)


def warmup(target: float, step: int, warmup_steps: int) -> float:
    """Return a factor that rises from 1 at step 0 to `target` at `warmup_steps`, and stays there; steps count from
    0."""
    if step >= warmup_steps:
        return float(target)
    return 1.0 + (target - 1.0) * step / warmup_steps


def set_rates(groups: Iterable[dict[str, Any]], factor: float) -> None:
    """Set the rate of every parameter group to `factor` times its base rate, the one that it was created with."""
    for group in groups:
        group.setdefault("base_lr", group["lr"])
        group["lr"] = factor * group["base_lr"]
