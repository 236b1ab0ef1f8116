"""A backward pass in two: the gradient of a stage's input first, those of its weights whenever there is time.

The stage before waits for the one and nobody for the other (Qi et al. 2023, "Zero Bubble Pipeline Parallelism",
section 2). What is put off are the two products of a linear layer that make no gradient of an input, dW = dYᵀ·X and the
sum of dY for its bias: nearly all of a weight's work in a transformer. Gains, embeddings and whatever else a stage has
are small, and get their gradients with the input's.

A linear layer is torch's own, or any module that multiplies by its `product`, as slices of one do (tensor.py).

Both parts are autograd's own graphs. A linear layer's output is that of weights without gradients, which makes the
first one torch's own; a hook on it keeps dY. Beside it the layer leaves a `Part`, an output without memory whose
backward pass is the second one. So hooks of parameters are called when their gradient comes, and what waits for its
second part is saved by autograd as all else: each layer's input X. The gradients of outputs dY wait beside it, as many
bytes.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Product: TypeAlias = Callable[[Tensor, Tensor, Tensor | None], Tensor]  # F.linear


class Part:
    """What is left to do for the weights of one layer: `output` and, once the first part went through, its gradient."""

    def __init__(self, output: Tensor) -> None:
        self.output = output
        self.gradient: Tensor | None = None

    def reach(self, gradient: Tensor) -> None:
        """The first part comes to the layer's output."""
        self.gradient = gradient


class SecondPart(torch.autograd.Function):
    """An output without memory, whose backward pass gives dW = dYᵀ·X and the sum of dY."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, bias: Tensor | None, inputs: Tensor) -> Tensor:
        ctx.has_bias = bias is not None
        ctx.save_for_backward(inputs)
        return inputs.new_zeros(()).expand(*inputs.shape[:-1], len(weight))  # [..., out]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, None]:
        (inputs,) = ctx.saved_tensors
        rows = gradient.flatten(0, -2)  # [n, out]
        return rows.mT @ inputs.flatten(0, -2), rows.sum(0) if ctx.has_bias else None, None


class SplitBackward:
    """Lets the linear layers of `stage` leave their weights for later: `left` has a part of each that was run."""

    def __init__(self, stage: nn.Module) -> None:
        self.left: list[Part] = []
        for module in stage.modules():
            if type(module) is nn.Linear:  # a subclass may compute something else
                module.forward = partial(linear, self._product, module)  # type: ignore[method-assign]
            elif hasattr(module, "product"):
                setattr(module, "product", self._product)  # noqa: B010  mypy takes any attribute for a parameter

    def taken(self) -> list[Part]:
        """The parts of what ran since they were taken last."""
        parts, self.left = self.left, []
        return parts

    def _product(self, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if not (torch.is_grad_enabled() and weight.requires_grad):
            return F.linear(inputs, weight, bias)
        part = Part(SecondPart.apply(weight, bias, inputs.detach()))  # type: ignore[no-untyped-call]
        self.left.append(part)
        given = inputs if inputs.requires_grad else inputs.detach().requires_grad_()  # or the output has no graph
        output = F.linear(given, weight.detach(), None if bias is None else bias.detach())  # [..., out]
        output.register_hook(part.reach)
        return output


def linear(product: Product, layer: nn.Linear, inputs: Tensor) -> Tensor:
    """The forward pass of a linear layer, by `product`."""
    return product(inputs, layer.weight, layer.bias)


def finish(parts: list[Part]) -> None:
    """Add the gradients of weights that `parts` left, the last layer's first; what no first part came to has none."""
    reached = [(part.output, part.gradient) for part in parts if part.gradient is not None]
    if reached:
        outputs, gradients = zip(*reached, strict=True)
        torch.autograd.backward(outputs, gradients)  # autograd runs what was made last first
