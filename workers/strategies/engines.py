"""Engines: how the microbatches of a step go through the stages.

Here is what runs any schedule of ours; the lesson of pipelines has one by hand, and one that is PyTorch's.
"""

from collections.abc import Callable
from typing import Protocol, TypeAlias

import torch
from torch import Tensor, nn

from workers.parallel.pipeline import Pipeline
from workers.workload.data import Microbatch
from workers.workload.dropout import Dropouts


class Engine(Protocol):
    """What a step of the strategy runs."""

    @property
    def most_in_flight(self) -> int | None:
        """Microbatches that this rank held for their backward pass, at most so far; None where nobody counts them."""

    def step(self, microbatches: list[Microbatch]) -> Tensor | None:
        """Add all microbatches' gradients to the parameters' own; returns the mean loss where the last stage is."""


# (share, samples of a microbatch, samples of the batch) -> what each loss term of the microbatch counts
Weigh: TypeAlias = Callable[[float, int, int], float]


def divided(share: float, num_samples: int, batch: int) -> float:  # noqa: ARG001  the same however the batch is divided
    """As it was dealt: one over the terms of the whole batch."""
    return share


class ByHand:
    """Our own pipeline."""

    def __init__(self, pipeline: Pipeline, loss: nn.Module, weigh: Weigh = divided) -> None:
        self.pipeline, self.loss, self.weigh = pipeline, loss, weigh

    @property
    def most_in_flight(self) -> int:
        return self.pipeline.most_in_flight

    def step(self, microbatches: list[Microbatch]) -> Tensor | None:
        batch = sum(len(microbatch.inputs) for microbatch in microbatches)

        def loss(index: int, output: Tensor) -> Tensor:
            inputs, targets, share = microbatches[index]
            weighed: Tensor = self.loss(output, targets) * self.weigh(share, len(inputs), batch)
            return weighed

        return self.pipeline.step([microbatch.inputs for microbatch in microbatches], loss)


class OfDroppedSamples:
    """An engine that says by which samples `dropouts` draw their masks, before `engine` cuts anything."""

    def __init__(self, engine: Engine, dropouts: Dropouts) -> None:
        self.engine, self.dropouts = engine, dropouts

    @property
    def most_in_flight(self) -> int | None:
        return self.engine.most_in_flight

    def step(self, microbatches: list[Microbatch]) -> Tensor | None:
        self.dropouts.deal([microbatch.inputs for microbatch in microbatches])
        return self.engine.step(microbatches)


def joined(microbatches: list[Microbatch]) -> Microbatch:
    """All microbatches as one; they are of one batch, so of one share."""
    inputs = torch.cat([microbatch.inputs for microbatch in microbatches])
    targets = torch.cat([microbatch.targets for microbatch in microbatches])
    return Microbatch(inputs, targets, microbatches[0].share)
