"""What every data-parallel variant shares: a whole model on each rank, one start for all, an optimizer each.

A variant differs in one thing only: how the gradients of the replicas become one (`Gradients`). The rest is the same
loop. Each rank begins from weights of its own, as a script without a seed would, and rank 0's are broadcast; then the
same sum of gradients and the same optimizer keep the replicas equal, to the bit, without ever sending a weight again.
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
from distlab.lab.workload.optimizer import HoldsLayers, forward_backward
from distlab.techniques.collectives.phases import marked
from distlab.techniques.data_parallel.buckets import broadcast_parameters


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
