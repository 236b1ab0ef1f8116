"""A backward pass in two: the gradient of a stage's input first, those of its weights whenever there is time.

The stage before waits for the one and nobody for the other (Qi et al. 2023, "Zero Bubble Pipeline Parallelism",
section 2). What is put off are the two products of a linear layer that make no gradient of an input, dW = dYᵀ·X and the
sum of dY for its bias: nearly all of a weight's work in a transformer. Gains, embeddings and whatever else a stage has
are small, and get their gradients with the input's.

Both parts are autograd's own graphs. A linear layer's output is that of weights without gradients, which makes the
first one torch's own; a hook on it keeps dY. Beside it the layer leaves a `Part`, an output without memory whose
backward pass is the second one. So hooks of parameters are called when their gradient comes, and what waits for its
second part is saved by autograd as all else: each layer's input X. The gradients of outputs dY wait beside it, as many
bytes.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


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
                module.forward = partial(self._linear, module)  # type: ignore[method-assign]

    def taken(self) -> list[Part]:
        """The parts of what ran since they were taken last."""
        parts, self.left = self.left, []
        return parts

    def _linear(self, linear: nn.Linear, inputs: Tensor) -> Tensor:
        weight, bias = linear.weight, linear.bias
        if not (torch.is_grad_enabled() and weight.requires_grad):
            return F.linear(inputs, weight, bias)
        part = Part(SecondPart.apply(weight, bias, inputs.detach()))  # type: ignore[no-untyped-call]
        self.left.append(part)
        given = inputs if inputs.requires_grad else inputs.detach().requires_grad_()  # or the output has no graph
        output = F.linear(given, weight.detach(), None if bias is None else bias.detach())  # [..., out]
        output.register_hook(part.reach)
        return output


def finish(parts: list[Part]) -> None:
    """Add the gradients of weights that `parts` left, the last layer's first; what no first part came to has none."""
    reached = [(part.output, part.gradient) for part in parts if part.gradient is not None]
    if reached:
        outputs, gradients = zip(*reached, strict=True)
        torch.autograd.backward(outputs, gradients)  # autograd runs what was made last first
