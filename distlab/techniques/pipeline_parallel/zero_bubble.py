"""A backward pass in two: the gradient of a stage's input first, those of its weights whenever there is time.

The stage before waits for the one and nobody for the other (Qi et al. 2023, "Zero Bubble Pipeline Parallelism",
section 2). What is put off are the two products of a linear layer that make no gradient of an input, dW = dYᵀ·X and
the sum of dY for its bias: nearly all of a weight's work in a transformer. Gains, embeddings and whatever else a
stage has are small, and get their gradients with the input's.

A linear layer is torch's own, or any module that multiplies by its `product`, as slices of one do
(distlab/techniques/tensor_parallel/layers.py).

A linear layer's output is that of weights without gradients, which makes the first part torch's own; a hook on it
keeps dY. Beside it the layer leaves a `Part`, which keeps its input X the way autograd does and whose products are
the second one. They go through autograd to the weights, so that hooks of parameters are called when their gradient
comes. What waits for the second part is each layer's X, and dY, as many bytes.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from distlab.lab.workload.model import fast_backward, save_for_backward

Product: TypeAlias = Callable[[Tensor, Tensor, Tensor | None], Tensor]  # F.linear


class LeftOver(Protocol):
    """Work of a backward pass that nobody waits for."""

    def finish(self) -> None: ...


class Part:
    """What is left to do for the weights of one layer, once the first part has come to its output."""

    def __init__(self, weight: Tensor, bias: Tensor | None, inputs: Tensor) -> None:
        self.weights = weight, bias
        self.kept = save_for_backward(inputs.detach())
        self.gradient: Tensor | None = None

    def reach(self, gradients: tuple[Tensor, ...]) -> None:
        """The first part comes to the layer's output."""
        (self.gradient,) = gradients

    def finish(self) -> None:
        """Add dW = dYᵀ·X and the sum of dY to the weights' gradients; without a dY there is nothing to add."""
        if self.gradient is None:
            return
        (weight, bias), (inputs,) = self.weights, self.kept.saved_tensors
        rows = self.gradient.flatten(0, -2)  # [n, out]
        product = rows.mT @ inputs.flatten(0, -2)
        if bias is None or not bias.requires_grad:
            fast_backward((weight,), (product,))
        else:
            fast_backward((weight, bias), (product, rows.sum(0)))


class SplitBackward:
    """Lets the linear layers of `stage` leave their weights for later: `left` has a part of each that was run."""

    def __init__(self, stage: nn.Module) -> None:
        self.left: list[LeftOver] = []
        for module in stage.modules():
            if type(module) is nn.Linear:  # a subclass may compute something else
                module.forward = partial(linear, self._product, module)  # type: ignore[method-assign]
            elif hasattr(module, "product"):
                setattr(module, "product", self._product)  # noqa: B010  mypy takes any attribute for a parameter

    def taken(self) -> list[LeftOver]:
        """The parts of what ran since they were taken last."""
        parts, self.left = self.left, []
        return parts

    def _product(self, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if not (torch.is_grad_enabled() and weight.requires_grad):
            return F.linear(inputs, weight, bias)
        part = Part(weight, bias, inputs)
        self.left.append(part)
        given = inputs if inputs.requires_grad else inputs.detach().requires_grad_()  # or the output has no graph
        output = F.linear(given, weight.detach(), None if bias is None else bias.detach())  # [..., out]
        node = output.grad_fn
        assert node is not None
        node.register_prehook(part.reach)  # behind a sleep 35 us less than a hook of the tensor
        return output


def linear(product: Product, layer: nn.Linear, inputs: Tensor) -> Tensor:
    return product(inputs, layer.weight, layer.bias)


def finish(parts: Sequence[LeftOver]) -> None:
    """Do what is left of one backward pass, the last layer's first."""
    for part in reversed(parts):
        part.finish()
