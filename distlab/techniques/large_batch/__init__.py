"""LARS: momentum SGD whose every layer moves by a share of its own size (You et al. 2017, algorithm 1).

    λ = η·‖w‖ / (‖g‖ + β·‖w‖)        the layer's rate, η the trust coefficient, β the weight decay
    v = μ·v + γ·λ·(g + β·w)           γ the learning rate, μ the momentum
    w = w - v

The denominator is the sum of two norms, not ‖g + βw‖: decay pulls along w, and where it points against the gradient the
norm of the sum would nearly vanish and the rate jump. Where a norm is zero the ratio ‖w‖ / (‖g‖ + β‖w‖) is taken as 1,
and λ = η, the factor that all other layers carry: with ‖w‖ = 0 the formula would hold a fresh layer at zero for ever,
and a bare 1 would let it run 1/η times as fast as the rest. With ‖g‖ = 0 only decay is left, at that same rate.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# Learning rates a layer: what LARS and LAMB share.
#
# A large batch takes few steps, so each has to be long, and one rate for all layers is bounded by the layer whose
# weights are small beside their gradients. A layer-wise optimizer scales each weight's update by a ratio of two
# norms, so that every layer moves by about the same share of its own size (You et al. 2017, section 4).
#
# Biases and the gains of norms are left out, of the ratio and of weight decay: a bias begins at zero, where a share
# of its size is no step at all. A norm is that of the whole weight. Where ranks hold parts of it, the squares of all
# parts are summed over them, in one call for all norms of a step; a part's own norm would give every rank another
# ratio, and turn the update.

# Of parameters: {"params": [...], "lr": ..., "weight_decay": ..., "adapted": whether a ratio scales it}.
Group = dict[str, Any]


def decayed_apart(parameters: Iterable[Tensor], weight_decay: float) -> list[Group]:
    """Two groups: matrices, which are scaled and decayed, and vectors (biases, gains), which are neither."""
    every = list(parameters)
    matrices, vectors = [each for each in every if each.dim() > 1], [each for each in every if each.dim() <= 1]
    return [
        {"params": matrices, "weight_decay": weight_decay, "adapted": True},
        {"params": vectors, "weight_decay": 0.0, "adapted": False},
    ]


class Layerwise:
    """An optimizer of parameter groups, as torch's are; a subclass says what a group's update is.

    Args: groups: as `decayed_apart` makes them. Where weights are sharded, every rank lists the same ones, its parts of
        them. lr: the rate of all groups that have none of their own. sharded_over: the ranks that hold parts of the
        weights; None where each holds them whole.
    """

    def __init__(self, groups: list[Group], lr: float, sharded_over: dist.ProcessGroup | None = None) -> None:
        self.param_groups: list[Group] = [{"lr": lr} | group for group in groups]
        self.sharded_over = sharded_over
        self.state: dict[Tensor, dict[str, Any]] = defaultdict(dict)

    @torch.no_grad()
    def step(self) -> None:
        """One update of every parameter that has a gradient."""
        for group in self.param_groups:
            trained = [parameter for parameter in group["params"] if parameter.grad is not None]
            if trained:
                self.update(trained, group)

    def update(self, parameters: list[Tensor], group: Group) -> None:
        """Step `parameters` of one group by their gradients."""
        raise NotImplementedError

    def norms(self, *lists: list[Tensor]) -> list[Tensor]:
        """The norm of each tensor, a vector a list, in a single all_reduce; they stay on the device, so that no step
        waits for it."""
        tensors = [tensor for one in lists for tensor in one]
        norms = torch.stack([torch.linalg.vector_norm(tensor) for tensor in tensors])
        if self.sharded_over is not None:
            squares = norms.square()
            dist.all_reduce(squares, group=self.sharded_over)
            norms = squares.sqrt()
        return list(norms.split([len(one) for one in lists]))


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


# LAMB: Adam whose every layer moves by a share of its own size (You et al. 2020, algorithm 2).
#
#     m = β1·m + (1-β1)·g        v = β2·v + (1-β2)·g²        m̂ = m/(1-β1^t)        v̂ = v/(1-β2^t)
#     r = m̂ / (√v̂ + ε)
#     w = w - γ·φ(‖w‖)/‖r + λw‖·(r + λw)        γ the learning rate, λ the weight decay, φ(z) = min(max(z, low), high)
#
# φ keeps a layer whose weights have grown from taking ever longer steps. Where a norm is zero the ratio is 1, and the
# layer takes Adam's step: with φ(‖w‖) = 0 a fresh layer would never leave zero, and with ‖r + λw‖ = 0 there is
# nothing to scale.


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
        ratios: Sequence[Tensor | float] = [1.0] * len(parameters)
        if group["adapted"]:
            ratios = self.ratios(parameters, steps)
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


# Learning rates for a batch of k times the base: pure functions of k and the step, as factors of the base rate.
#
#     unscaled    1           as many samples in k times fewer steps of the same length: slow
#     sqrt        √k          keeps the variance of an update: k times the samples have 1/k of the noise
#                             (Krizhevsky 2014, section 5)
#     linear      k           k steps of η along nearly equal gradients are one step of kη
#                             (Goyal et al. 2017, section 2.1)
#     warmup      1 to k      linear, but it gets there in equal steps, since early gradients are not nearly equal
#                             (section 2.2)
#
# A factor leaves every parameter group its own base rate: one rate for all groups would undo what they are there for.


def unscaled(k: float) -> float:  # noqa: ARG001
    return 1.0


def sqrt(k: float) -> float:
    return math.sqrt(k)


def linear(k: float) -> float:
    return float(k)


def warmup(target: float, step: int, warmup_steps: int) -> float:
    """From the base rate at step 0 to `target` times it at `warmup_steps`, and no further ever after; steps count from
    0."""
    if step >= warmup_steps:
        return float(target)
    return 1.0 + (target - 1.0) * step / warmup_steps


def set_rates(groups: Iterable[dict[str, Any]], factor: float) -> None:
    """Give every parameter group `factor` times its own base rate, which is the one it was made with."""
    for group in groups:
        group.setdefault("base_lr", group["lr"])
        group["lr"] = factor * group["base_lr"]
