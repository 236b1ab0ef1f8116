"""Pretended compute: stages that sleep, so that two cores can show the bubble of four ranks.

Four ranks that compute on two cores take turns, whatever the schedule says. Four that sleep do not. LAB_SLEEP_MS is
the time of one microbatch's samples forward through one rank, twice that backward (the gradients of weights and of
inputs are a product each); of v chunks each takes its share, and a microbatch with more samples takes longer. The
rank of LAB_SLOW_RANK sleeps longer by as much as it is slower. The real layers are still there, and what they take
comes on top.
"""

import time
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from workers.config import Config


class Sleep(torch.autograd.Function):
    """Identity; sleeps so many seconds in forward, twice as many in backward."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, seconds: float) -> Tensor:
        """A copy: torch's schedules detach a stage's output in place, which a view does not allow."""
        ctx.seconds = seconds
        time.sleep(seconds)
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """The gradient as it came."""
        time.sleep(2 * ctx.seconds)
        return gradients[0], None


def pretend_compute(stages: Iterable[nn.Module], config: Config, sleep_ms: float, chunks: int) -> None:
    """Let each of a rank's `chunks` stages sleep behind its layers, `sleep_ms` a microbatch in all."""
    samples = config.batch / config.num_microbatches
    per_sample_s = sleep_ms / config.slowed_to / 1e3 / chunks / samples

    def sleep(stage: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor:  # noqa: ARG001  what a hook is given
        slept: Tensor = Sleep.apply(output, per_sample_s * len(output))  # type: ignore[no-untyped-call]
        return slept

    for stage in stages:
        stage.register_forward_hook(sleep)
