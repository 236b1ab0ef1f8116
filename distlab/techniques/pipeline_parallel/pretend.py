"""Simulated compute: stages that sleep, so that two cores can show the bubble of four ranks.

Four ranks that compute on two cores take turns in any schedule; four that sleep do not. LAB_SLEEP_MS is the forward
time of one microbatch through one rank. The backward takes twice that: once for the gradient of the input, once for
those of the weights. Each of v chunks takes its share, and microbatches with more samples take longer. The rank of
LAB_SLOW_RANK sleeps proportionally longer. The real layers still run, and their time is added.
"""

import time
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from distlab.lab.config import Config
from distlab.techniques.pipeline_parallel.zero_bubble import SplitBackward


class Sleep(torch.autograd.Function):
    """Identity that sleeps `forward_s` in forward and `backward_s` in backward."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, forward_s: float, backward_s: float) -> Tensor:
        """Return a copy: torch's schedules detach a stage's output in place, which a view does not allow."""
        ctx.seconds = backward_s
        if forward_s:
            time.sleep(forward_s)
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient unchanged, after the sleep."""
        time.sleep(ctx.seconds)
        return gradients[0], None, None


class DeferredSleep(NamedTuple):
    """The sleep of the deferred part of a backward pass."""

    seconds: float

    def finish(self) -> None:
        time.sleep(self.seconds)


def pretend_compute(
    stages: Mapping[int, nn.Module], config: Config, sleep_ms: float, splits: Mapping[int, SplitBackward]
) -> None:
    """Let each of a rank's `stages` sleep, `sleep_ms` per microbatch in total; stages in `splits` sleep in both parts
    of their backward pass."""
    samples = config.batch / config.num_microbatches
    per_sample_s = sleep_ms / config.slowed_to / 1e3 / len(stages) / samples
    for number, stage in stages.items() if sleep_ms else ():
        linear = next((module for module in stage.modules() if type(module) is nn.Linear), None)
        split = splits.get(number)
        if split is not None:
            backward_s = per_sample_s
            stage.register_forward_hook(partial(sleeps_later, split, per_sample_s))
        elif linear is not None:
            backward_s = per_sample_s
            linear.forward = partial(sleeps_with_weight, linear, per_sample_s)  # type: ignore[method-assign]
        else:
            backward_s = 2 * per_sample_s
        stage.register_forward_hook(partial(sleeps, per_sample_s, backward_s))


def sleeps(forward_s: float, backward_s: float, _stage: nn.Module, _inputs: tuple[Tensor], output: Tensor) -> Tensor:
    """Forward hook: delay the output by so much per sample."""
    slept: Tensor = Sleep.apply(output, forward_s * len(output), backward_s * len(output))  # type: ignore[no-untyped-call]
    return slept


def sleeps_later(
    split: SplitBackward, seconds: float, _stage: nn.Module, _inputs: tuple[Tensor], output: Tensor
) -> None:
    """Hook: add a sleep to the deferred part of the backward pass."""
    if torch.is_grad_enabled():
        split.deferred.append(DeferredSleep(seconds * len(output)))


def sleeps_with_weight(linear: nn.Linear, seconds: float, inputs: Tensor) -> Tensor:
    """Apply the layer, and sleep with its weight's gradient, which PyTorch's schedules defer."""
    weight: Tensor = Sleep.apply(linear.weight, 0.0, seconds * len(inputs))  # type: ignore[no-untyped-call]
    return F.linear(inputs, weight, linear.bias)
