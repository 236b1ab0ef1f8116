"""Activation checkpointing: a layer keeps its input alone, and computes itself again when the backward pass needs the
rest.

Memory for the backward pass falls from all that every layer saves to one tensor a layer, for one more forward pass
(Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost", section 4). torch.utils.checkpoint does the same;
its first call imports torch's compiler, a second of an idle core and 80 MB of each rank (`python -X importtime -c
"import torch._dynamo"`), in a lab that counts them. What a layer drops is a function of its samples (dropout.py), so no
generator has to be put back; who computes again says of which samples.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from workers.parallel.kept import kept


class _Computed(Exception):
    """All that the layer saved is there again; what it would still compute nobody needs."""


class _Pass:
    """One pass of one layer: it saves places in a list instead of tensors; the first that is asked for fills the
    list."""

    def __init__(self, layer: Callable[[Tensor], Tensor], hidden: Tensor) -> None:
        self.layer = layer
        self.input = kept(hidden)
        self.computed: Any = None
        self.num_saved = 0

    def save(self, tensor: Tensor) -> int:
        del tensor
        self.num_saved += 1
        return self.num_saved - 1

    def load(self, place: int) -> Tensor:
        if self.computed is None:
            with torch.enable_grad():  # the backward pass runs without
                self.computed = kept(*self._compute())
        tensor: Tensor = self.computed.saved_tensors[place]
        return tensor

    def _compute(self) -> list[Tensor]:
        """What the layer saved, in the order in which it did."""
        tensors: list[Tensor] = []

        def collect(tensor: Tensor) -> None:
            tensors.append(tensor.detach())
            if len(tensors) == self.num_saved:
                raise _Computed

        (hidden,) = self.input.saved_tensors
        try:
            with torch.enable_grad(), saved_tensors_hooks(collect, self._lost):
                self.layer(hidden)
        except _Computed:
            pass
        return tensors

    @staticmethod
    def _lost(nothing: None) -> Tensor:
        raise AssertionError(f"the graph of the second pass is never run backward, and keeps {nothing}")


def recomputed(layer: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
    """`layer(hidden)`, of which the backward pass finds only `hidden`. The layer must compute the same again."""
    this = _Pass(layer, hidden)
    with saved_tensors_hooks(this.save, this.load):
        return layer(hidden)
