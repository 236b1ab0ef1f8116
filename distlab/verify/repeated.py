"""What LAB_RECOMPUTE=1 promises: each layer is computed again in the backward pass, and kept in between is its input.

What is predicted of it is counted by running the same code alone (counted.py), which keeps what that code keeps. So it
is stated here what has to be alive, and how often each layer is passed: by its own hooks, and by whether autograd is at
work then.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from distlab.lab import Lab
from distlab.measure.memory import Storages, label_before

SAMPLES = 2
# A gradient comes in, and on the way through a layer's ends one more. What a block saves is nine times that and more.
MOST_BESIDE = 4.0
CONTROL = "tests/verify/test_again.py::test_a_layer_that_is_not_computed_again_is_seen"


class Passes:
    """How often each of `layers` is computed, first and again in a backward pass."""

    def __init__(self, layers: Mapping[int, nn.Module]) -> None:
        self.layers = layers
        self.first: Counter[int] = Counter()
        self.again: Counter[int] = Counter()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Count inside the block."""
        hooks = [layer.register_forward_pre_hook(partial(self._passed, index)) for index, layer in self.layers.items()]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        self.layers = {}

    def _passed(self, index: int, _layer: nn.Module, inputs: tuple[Any, ...]) -> None:
        if inputs and isinstance(inputs[0], Tensor) and not inputs[0].is_floating_point():
            return  # an embedding, which keeps what it is given, and no more
        (self.again if in_backward() else self.first)[index] += 1

    def missing(self) -> int:
        """Passes of a layer that were not made once more, or that were without need."""
        return sum(abs(self.first[index] - self.again[index]) for index in self.first | self.again)


def in_backward() -> bool:
    """Whether autograd is at work on this thread."""
    return bool(torch._C._current_graph_task_id() != -1)


def check_passes(lab: Lab, name: str, passes: Passes) -> None:
    """Of a step of one variant on this rank."""
    told = f"of {passes.first.total()} passes through a layer on this rank"
    lab.check("computed again", passes.missing(), 0, variant=name, detail=told, control=CONTROL)


def hold_recomputation(lab: Lab, control: str) -> None:
    """One pass of the model forward and back: whenever a layer is computed again, the inputs of those before it are
    alive, and next to nothing else."""
    dtype = getattr(torch, lab.config.dtype)
    model, whole = lab.model(dtype), lab.batches(dtype).full(0)
    inputs, targets = whole.inputs[:SAMPLES], whole.targets[:SAMPLES]
    seen = Alive(list(model.layers), lab.device)
    with seen.storages:
        seen.begin(inputs, targets)
        model(inputs, targets).backward()
    detail = f"times a layer's input is alive besides, as layer {seen.where} is computed again"
    lab.check("recomputation", seen.worst, MOST_BESIDE, detail=detail, control=control)


class Alive:
    """The most bytes that are alive besides the inputs of layers whenever one is computed again, as a multiple of the
    larger of its input and its output; the last one has the loss behind it, and does not count."""

    def __init__(self, layers: list[nn.Module], device: torch.device) -> None:
        self.storages, self.worst, self.where = Storages(device.type), 0.0, "none"
        self.kept: list[int] = []  # bytes of the input of each layer
        for index, layer in enumerate(layers):
            layer.register_forward_pre_hook(partial(self._passed, index, index == len(layers) - 1))
            for parameter in layer.parameters():
                parameter.register_post_accumulate_grad_hook(drop)

    def begin(self, *given: Tensor) -> None:
        """All that is alive now does not count."""
        label_before(self.storages)
        for tensor in given:
            self.storages.add(tensor)
        self.before = self.storages.live_bytes

    def _passed(self, index: int, last: bool, _layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if not in_backward():
            self.kept.append(inputs[0].nbytes if index else 0)
        elif index and not last:
            beside = self.storages.live_bytes - self.before - sum(self.kept[: index + 1])
            share = beside / max(self.kept[index : index + 2])
            if share > self.worst:
                self.worst, self.where = share, str(index)


def drop(parameter: Tensor) -> None:
    """Let go of a gradient as soon as it is there."""
    parameter.grad = None
