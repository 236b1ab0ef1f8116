"""Purposes: what a storage is for, found without a word from the strategy that made it.

    parameters      the memory behind every nn.Parameter alive
    optimizer       what a torch.optim.Optimizer remembers of them, and master weights: the lab's models are of one
                    dtype, so a parameter that is kept more exactly than another is its master
    gradients       every `.grad`, and what autograd hands over for a parameter: ZeRO-2 consumes it at once
    communication   what a collective, a send or a receive was given
    activations     all else: what autograd saves for the backward pass, the batch, what an operation leaves for the
                    next

Who is two things is the stronger one: parameters, optimizer, gradients, saved activations, communication. So a bucket
of which gradients are views is a gradient although it is summed over the ranks, and a gathered weight is a parameter.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from workers.measure.storages import COMMUNICATION, Life, Storages

# As they are drawn, from the ground up.
CLASSES = ("parameters", "gradients", "optimizer", "activations", COMMUNICATION)
BEFORE, SAVED = "before", "saved"
_STRONGEST_FIRST = ("parameters", "optimizer", "gradients", SAVED, COMMUNICATION)


def class_of(life: Life) -> str:
    """The one of CLASSES that a storage counts under."""
    label = next((label for label in _STRONGEST_FIRST if label in life.labels), SAVED)
    return "activations" if label == SAVED else label


class Owners:
    """Who gives memory its purpose, as far as it is alive now: parameters, with their gradients, and optimizers."""

    def __init__(self, storages: Storages) -> None:
        self._storages = storages
        found = list(_alive((Tensor, torch.optim.Optimizer)))
        # fully_shard's are DTensors by type; an outline's, on the meta device, hold nothing.
        self.parameters = [
            thing for thing in found if isinstance(thing, nn.Parameter) and thing.device.type == storages.device_type
        ]
        # What was alive before is another's: a leftover in 16 bits would make masters of all weights.
        ours = [parameter.itemsize for parameter in self.parameters if not storages.was(parameter, BEFORE)]
        self._model_itemsize = min(ours, default=0)
        self.optimizers = [thing for thing in found if isinstance(thing, torch.optim.Optimizer)]

    def label(self) -> None:
        """Label what they hold now."""
        for tensor, label in self._held():
            self._storages.add(tensor, label)

    def let_go(self) -> None:
        """Wait until messages that nobody here owns are dead: gloo's thread holds one a little longer than its call."""
        self._storages.let_go([tensor for tensor, _ in self._held()])

    def _held(self) -> Iterator[tuple[Tensor, str]]:
        """Each tensor with its purpose."""
        for parameter in self.parameters:
            yield parameter, "optimizer" if parameter.itemsize > self._model_itemsize else "parameters"
            if parameter.grad is not None:
                yield parameter.grad, "gradients"
        for state in [state for optimizer in self.optimizers for state in optimizer.state.values()]:
            yield from ((value, "optimizer") for value in state.values() if isinstance(value, Tensor))

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Label every gradient that autograd hands to a parameter inside the block."""
        add = self._storages.add
        hooks = [
            parameter.register_hook(lambda gradient: add(gradient, "gradients"))
            for parameter in self.parameters
            if parameter.requires_grad
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def label_before(storages: Storages) -> None:
    """Count all tensors alive, their gradients too, as there before."""
    gc.collect()  # or garbage would count
    for tensor in _alive(Tensor):
        storages.add(tensor, BEFORE)
        if tensor.is_leaf and tensor.grad is not None:
            storages.add(tensor.grad, BEFORE)


def _alive(kinds: Any) -> Iterator[Any]:
    """All objects of these types; by their type, for a proxy whose object is gone cannot be asked."""
    return (thing for thing in gc.get_objects() if issubclass(type(thing), kinds))
