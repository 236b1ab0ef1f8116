"""The parts that all data-parallel variants share: a full model, equal initial weights and an optimizer on each rank.

Variants differ only in how the gradients of the replicas are summed (`Gradients`); the rest is the same loop. Each rank
draws its own weights, as a script without a seed would, and rank 0's are broadcast. After that the same gradient sum
and the same optimizer keep the replicas equal to the bit, without sending a weight again.
"""

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
from distlab.lab.workload.optimizer import LayersStrategy, forward_backward
from distlab.techniques.collectives.phases import marked
from distlab.techniques.data_parallel.buckets import broadcast_parameters


class Gradients(Protocol):
    """How the gradients of all replicas are summed; `GradientBuckets` is the real implementation."""

    def zero(self) -> None:
        """Run before the first microbatch."""

    def accumulate(self, *, last: bool) -> AbstractContextManager[None]:
        """Wrap forward and backward of a microbatch."""

    def finish(self) -> None:
        """Run after the last microbatch; then every gradient is the sum over all ranks."""


class Replica(LayersStrategy):
    """A Strategy with `model` as this rank's replica; `forward` is called in its place where one is given.

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
        """Sum the gradients of all microbatches locally, then once per step over all ranks."""
        losses: list[Tensor] = []
        self.gradients.zero()
        for number, microbatch in enumerate(microbatches):
            with self.gradients.accumulate(last=number == len(microbatches) - 1):
                losses.append(forward_backward(self.forward, microbatch, number, self.scale))
        self.gradients.finish()
        return torch.stack(losses).sum()

    def full(self, kind: str) -> Iterator[tuple[str, Tensor]]:
        """Return this rank's tensors; a replica has all of them, so nothing is sent."""
        return self.held(kind)

    def alike(self, kind: str) -> Iterator[tuple[str, Tensor]]:
        """Return the tensors that are equal on every rank, to the bit."""
        return self.held(kind)


class Lesson(LayersStrategy):
    """A Strategy that runs the `step(microbatches)` of a lesson.py. The step leaves the summed gradients on this rank's
    replica `model` and returns its share of the loss."""

    full = alike = LayersStrategy.held

    def __init__(self, model: Model, config: Config, step: Callable[[Any], Tensor]) -> None:
        super().__init__(model, config)
        self.step = step

    def backward(self, microbatches: list[Microbatch]) -> Tensor:
        """Run the lesson's step, with its passes marked from outside."""
        with marked(self.model):
            return self.step(microbatches)


class DDPGradients:
    """DistributedDataParallel as `Gradients`: it sums inside `backward`, except under `no_sync`."""

    def __init__(self, parallel: DistributedDataParallel) -> None:
        self.parallel = parallel

    def zero(self) -> None:
        self.parallel.zero_grad()

    def accumulate(self, *, last: bool) -> AbstractContextManager[None]:
        return nullcontext() if last else self.parallel.no_sync()

    def finish(self) -> None:
        """Do nothing: DDP has waited at the end of `backward`."""


def draw_own_weights(model: Model, group: dist.ProcessGroup, config: Config) -> None:
    """Draw this rank's own weights, as a script without a seed would."""
    if group.rank() > 0:
        model.initialise(config.seed + group.rank())


def draw_and_broadcast(model: Model, group: dist.ProcessGroup, config: Config) -> None:
    """Draw this rank's own weights, then overwrite them with rank 0's."""
    draw_own_weights(model, group, config)
    broadcast_parameters(model.parameters(), group)
