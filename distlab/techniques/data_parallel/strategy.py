"""What every data-parallel variant shares: a whole model on each rank, one start for all, an optimizer each.

A variant differs in one thing only: how the gradients of the replicas become one (`Gradients`). The rest is the same
loop. Each rank begins from weights of its own, as a script without a seed would, and rank 0's are broadcast; then the
same sum of gradients and the same optimizer keep the replicas equal, to the bit, without ever sending a weight again.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from distlab.lab.config import Config
from distlab.lab.workload.data import Microbatch
from distlab.lab.workload.model import Model
from distlab.lab.workload.optimizer import HoldsLayers, StepsParameters, forward_backward
from distlab.lab.workload.user_model import find_in_file
from distlab.techniques.collectives.phases import marked
from distlab.techniques.data_parallel.buckets import broadcast_parameters
from distlab.techniques.mesh.grid import Mesh


class Gradients(Protocol):
    """How the gradients of all replicas become one; `GradientBuckets` is the real one."""

    def zero(self) -> None:
        """Before the first microbatch."""

    def accumulate(self, *, last: bool) -> AbstractContextManager[None]:
        """Around forward and backward of a microbatch."""

    def finish(self) -> None:
        """After the last one: every gradient is the sum over all ranks."""


class Replica(HoldsLayers):
    """A Strategy: `model` is this rank's replica, `forward` what its passes run through if not the model itself.

    `scale` multiplies the loss that is differentiated, for a variant that averages where the others sum.
    """

    def __init__(
        self,
        model: Model,
        config: Config,
        gradients: Gradients,
        *,
        forward: nn.Module | None = None,
        scale: float = 1.0,
    ) -> None:
        super().__init__(model, config)
        self.gradients = gradients
        self.forward = forward or model
        self.scale = scale

    def backward(self, microbatches: list[Microbatch]) -> Tensor:
        """Sum the gradients of all microbatches here, then once over all ranks, not once a microbatch."""
        shares: list[Tensor] = []
        self.gradients.zero()
        for number, microbatch in enumerate(microbatches):
            with self.gradients.accumulate(last=number == len(microbatches) - 1):
                shares.append(forward_backward(self.forward, microbatch, number, self.scale))
        self.gradients.finish()
        return torch.stack(shares).sum()

    def full(self, kind: str) -> Iterator[tuple[str, Tensor]]:
        """A replica holds everything: nothing is sent."""
        return self.held(kind)

    def alike(self, kind: str) -> Iterator[tuple[str, Tensor]]:
        """The same on every rank, to the bit."""
        return self.held(kind)


class Lesson(HoldsLayers):
    """A Strategy whose passes are those of a lesson.py: `step(microbatches)` leaves every gradient, summed, on this
    rank's replica `model`, and returns the share of the loss."""

    full = alike = HoldsLayers.held

    def __init__(self, model: Model, config: Config, step: Callable[[Any], Tensor]) -> None:
        super().__init__(model, config)
        self.step = step

    def backward(self, microbatches: list[Microbatch]) -> Tensor:
        """The lesson's step, whose passes are marked from outside."""
        with marked(self.model):
            return self.step(microbatches)


class Wrapped:
    """PyTorch's DistributedDataParallel as `Gradients`: it sums inside of `backward`, unless it is told that more
    microbatches follow."""

    def __init__(self, parallel: DistributedDataParallel) -> None:
        self.parallel = parallel

    def zero(self) -> None:
        self.parallel.zero_grad()

    def accumulate(self, *, last: bool) -> AbstractContextManager[None]:
        return nullcontext() if last else self.parallel.no_sync()

    def finish(self) -> None:
        """Nothing is left: DDP waits at the end of `backward`."""


def begin_apart(model: Model, group: dist.ProcessGroup, config: Config) -> None:
    """Draw this rank's own weights, as a script without a seed would."""
    if group.rank() > 0:
        model.initialise(config.seed + group.rank())


def begin_alike(model: Model, group: dist.ProcessGroup, config: Config) -> None:
    """Draw this rank's own weights, then give all ranks those of rank 0."""
    begin_apart(model, group, config)
    broadcast_parameters(model.parameters(), group)


# A strategy of one's own in a mode: LAB_VARIANT=...,FILE:name stands as a column beside the lab's and PyTorch's.
#
# `name(model, mesh, config)` makes a Strategy, as a lesson's variants do; `name(model, optimizer, microbatches,
# group)` is a whole training step, which is cut in two where it steps its optimizer: what comes before is the
# backward pass.

STEP = ("model", "optimizer", "microbatches", "group")


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


def is_step(spec: str) -> bool:
    """Whether LAB_VARIANT names a whole training step, of a rank with the whole model and its own samples."""
    return tuple(inspect.signature(find_in_file(spec, spec.rpartition(":")[2])).parameters) == STEP


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
