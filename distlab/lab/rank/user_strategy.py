"""Run a user's strategy in a mode: LAB_VARIANT=...,FILE:name adds a column next to the lab's and PyTorch's.

`name(model, mesh, config)` makes a Strategy, as a lesson's variants do; `name(model, optimizer, microbatches, group)`
is a whole training step, which is split at its optimizer step: everything before is the backward pass.
"""

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from distlab.lab.config import Config
from distlab.lab.workload.data import Microbatch
from distlab.lab.workload.model import Model
from distlab.lab.workload.optimizer import StepsParameters
from distlab.lab.workload.user_model import STEP, find_in_file, is_step
from distlab.techniques.mesh.grid import Mesh


def strategy_maker(spec: str) -> Callable[..., Any]:
    """Return the function that makes a strategy on a rank; raises TypeError if the file has no such function."""
    function: Callable[..., Any] | None = find_in_file(spec, spec.rpartition(":")[2])
    if function is None or not callable(function):
        raise TypeError(f"has no function {spec.rpartition(':')[2]!r}")
    if is_step(spec):
        return lambda model, mesh, config: TrainStepStrategy(function, model, mesh, config)
    try:
        inspect.signature(function).bind("model", "mesh", "config")
    except TypeError:
        raise TypeError(
            f"is no strategy: expected a function of (model, mesh, config), or of ({', '.join(STEP)})"
        ) from None
    return function


class Deferred:
    """The optimizer as a training step sees it: `update` takes its `step` later."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self.steps = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)

    def step(self) -> None:
        """Record that a step was requested."""
        self.steps += 1


class TrainStepStrategy(StepsParameters):
    """A Strategy made from a whole training step."""

    def __init__(self, step: Callable[..., Any], model: Model, mesh: Mesh, config: Config) -> None:
        super().__init__(model, config)
        self._step, self._group = step, mesh.group

    def backward(self, microbatches: list[Microbatch]) -> Tensor | None:
        """Run all of it except the optimizer's step."""
        deferred = Deferred(self.optimizer)
        share = self._step(self.model, deferred, microbatches, self._group)
        if deferred.steps != 1:
            raise ValueError(f"the training step called optimizer.step() {deferred.steps} times, expected once")
        if share is None:  # then the lab asks for it itself: losses are checked too
            with torch.no_grad():
                share = sum(self.model(inputs, targets) * weight for inputs, targets, weight in microbatches)
        return torch.tensor(float(share), dtype=torch.float64)  # torch rounds a Python number to float32

    def update(self) -> None:
        """Take the requested step: it clips by itself."""
        self.optimizer.step()

    def full(self, kind: str) -> Iterator[tuple[str, Tensor]]:
        """Return the parameters; a replica has all of them."""
        return self.held(kind)
