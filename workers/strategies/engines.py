"""Engines: how the microbatches of a step go through the stages, ours; `torch_schedules` has PyTorch's."""

from typing import Protocol

import torch
from torch import Tensor, nn

from experiments.pp.faults import undivided
from workers.config import Config
from workers.parallel.pipeline import Pipeline
from workers.workload.data import Microbatch


class Engine(Protocol):
    """What a step of the strategy runs."""

    def step(self, microbatches: list[Microbatch]) -> Tensor | None:
        """Add all microbatches' gradients to the parameters' own; returns the mean loss where the last stage is."""


class ByHand:
    """Our own pipeline; `whole`: with all microbatches as one."""

    def __init__(self, pipeline: Pipeline, loss: nn.Module, config: Config, *, whole: bool = False) -> None:
        self.pipeline, self.loss, self.config, self.whole = pipeline, loss, config, whole

    def step(self, microbatches: list[Microbatch]) -> Tensor | None:
        if self.whole:
            microbatches = [joined(microbatches)]
        if self.config.bug == "undivided_loss":
            microbatches = undivided(microbatches)

        def loss(index: int, output: Tensor) -> Tensor:
            weighed: Tensor = self.loss(output, microbatches[index].targets) * microbatches[index].share
            return weighed

        return self.pipeline.step([microbatch.inputs for microbatch in microbatches], loss)


def joined(microbatches: list[Microbatch]) -> Microbatch:
    """All microbatches as one; they are of one batch, so of one share."""
    inputs = torch.cat([microbatch.inputs for microbatch in microbatches])
    targets = torch.cat([microbatch.targets for microbatch in microbatches])
    return Microbatch(inputs, targets, microbatches[0].share)
