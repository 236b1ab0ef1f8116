"""Split backward passes: the gradient of a stage's input now, the gradients of its weights later.

The previous stage waits for the first but not for the second (Qi et al. 2023, "Zero Bubble Pipeline Parallelism",
section 2). Deferred are the two products of a linear layer that produce no gradient of an input, dW = dYᵀ·X and the sum
of dY for its bias: nearly all weight-gradient work in a transformer. Gains, embeddings and other parameters are small,
and their gradients are computed with the input's.

A linear layer is torch's own, or any module that calls its `product`, as tensor-parallel slices do
(distlab/techniques/tensor_parallel/layers.py).

A linear layer's output is computed from detached weights, so the first part is plain autograd; a hook on it saves dY.
The layer also leaves a `DeferredWeights`, which saves its input X as autograd does, and computes the two products
later. They reach the weights through autograd, so that hooks of parameters run when their gradient is ready. X and dY
of each layer, equally large, are stored until the second part.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from distlab.lab.workload.model import fast_backward, save_for_backward

Product: TypeAlias = Callable[[Tensor, Tensor, Tensor | None], Tensor]  # F.linear


class Deferred(Protocol):
    """Deferred work of a backward pass."""

    def finish(self) -> None: ...


class DeferredWeights:
    """The deferred weight gradients of one layer; complete once the first part has reached its output."""

    def __init__(self, weight: Tensor, bias: Tensor | None, inputs: Tensor) -> None:
        self.weights = weight, bias
        self.saved = save_for_backward(inputs.detach())
        self.gradient: Tensor | None = None

    def on_gradient(self, gradients: tuple[Tensor, ...]) -> None:
        """Save dY when the first part reaches the layer's output."""
        (self.gradient,) = gradients

    def finish(self) -> None:
        """Add dW = dYᵀ·X and the sum of dY to the weights' gradients; without a dY there is nothing to add."""
        if self.gradient is None:
            return
        (weight, bias), (inputs,) = self.weights, self.saved.saved_tensors
        rows = self.gradient.flatten(0, -2)  # [n, out]
        product = rows.mT @ inputs.flatten(0, -2)
        if bias is None or not bias.requires_grad:
            fast_backward((weight,), (product,))
        else:
            fast_backward((weight, bias), (product, rows.sum(0)))


class SplitBackward:
    """Makes the linear layers of `stage` defer their weights: `deferred` has a part for each layer that ran."""

    def __init__(self, stage: nn.Module) -> None:
        self.deferred: list[Deferred] = []
        for module in stage.modules():
            if type(module) is nn.Linear:  # a subclass may compute something else
                module.forward = partial(linear, self._product, module)  # type: ignore[method-assign]
            elif hasattr(module, "product"):
                setattr(module, "product", self._product)  # noqa: B010  mypy takes any attribute for a parameter

    def pop_deferred(self) -> list[Deferred]:
        """Return the parts of all layers that ran since the last call."""
        deferred, self.deferred = self.deferred, []
        return deferred

    def _product(self, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if not (torch.is_grad_enabled() and weight.requires_grad):
            return F.linear(inputs, weight, bias)
        part = DeferredWeights(weight, bias, inputs)
        self.deferred.append(part)
        traced = inputs if inputs.requires_grad else inputs.detach().requires_grad_()  # or the output has no graph
        output = F.linear(traced, weight.detach(), None if bias is None else bias.detach())  # [..., out]
        node = output.grad_fn
        assert node is not None
        node.register_prehook(part.on_gradient)  # 35 us less after a sleep than a hook of the tensor
        return output


def linear(product: Product, layer: nn.Linear, inputs: Tensor) -> Tensor:
    return product(inputs, layer.weight, layer.bias)


def finish(parts: Sequence[Deferred]) -> None:
    """Do the deferred work of one backward pass, the last layer's first."""
    for part in reversed(parts):
        part.finish()
