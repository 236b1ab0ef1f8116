"""A strategy of one's own in a mode: LAB_VARIANT=...,FILE:name stands as a column beside the lab's and PyTorch's.

`name(model, mesh, config)` makes a Strategy, as a lesson's variants do; `name(model, optimizer, microbatches, group)`
is a whole training step, which is cut in two where it steps its optimizer: what comes before is the backward pass.
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


def maker(spec: str) -> Callable[..., Any]:
    """What makes a strategy on a rank; raises TypeError where the file has no such function."""
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
    """The optimizer as a training step sees it: its `step` is taken later, by `update`."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self.steps = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)

    def step(self) -> None:
        """Note that it was asked for."""
        self.steps += 1


class TrainStepStrategy(StepsParameters):
    """A Strategy of a whole training step."""

    def __init__(self, step: Callable[..., Any], model: Model, mesh: Mesh, config: Config) -> None:
        super().__init__(model, config)
        self._step, self._group = step, mesh.group

    def backward(self, microbatches: list[Microbatch]) -> Tensor | None:
        """All of it but the optimizer's step."""
        deferred = Deferred(self.optimizer)
        share = self._step(self.model, deferred, microbatches, self._group)
        if deferred.steps != 1:
            raise ValueError(f"the training step called optimizer.step() {deferred.steps} times, expected once")
        if share is None:  # then the lab asks for it itself: losses are held too
            with torch.no_grad():
                share = sum(self.model(inputs, targets) * weight for inputs, targets, weight in microbatches)
        return torch.tensor(float(share), dtype=torch.float64)  # of a Python number torch keeps half the digits

    def update(self) -> None:
        """The step that was asked for: it clips by itself."""
        self.optimizer.step()

    def full(self, kind: str) -> Iterator[tuple[str, Tensor]]:
        """A replica holds everything."""
        return self.held(kind)
