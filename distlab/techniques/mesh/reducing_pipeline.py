"""A pipeline with data parallelism: a stage's gradients are summed during its last backward pass.

Data parallelism sums the gradients once per step, overlapped with the backward pass. In a pipeline a step has many
backward passes, and a stage's gradients are complete only in the last one: a sum before that adds partial gradients,
different on every rank, without any error. With hooks armed for the whole schedule, the first microbatch would launch
the buckets. So each reducer is notified of every backward pass, and which is the last (Narayanan et al. 2021,
"Megatron-LM", section 3, sum after the whole pipeline; later releases do as here).

Ranks along the data-parallel axis run the same list of actions, so their sums have the same order.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Protocol

import torch.distributed as dist
from torch import nn

from distlab.techniques.pipeline_parallel.pipeline import Pipeline
from distlab.techniques.pipeline_parallel.schedules import Action


class Reducer(Protocol):
    """How some parameters' gradients are summed over all replicas, and what is stored of them."""

    def begin(self) -> None:
        """Run before the first microbatch."""

    def microbatch(self, *, last: bool) -> AbstractContextManager[None]:
        """Wrap the backward pass of a microbatch."""

    def finish(self) -> None:
        """Run after the last microbatch; then every gradient is the sum over all replicas."""


class ReducingPipeline(Pipeline):
    """`Pipeline` whose stages' gradients `reducers` sum; `turn_to(microbatch)` is called before each backward."""

    def __init__(
        self, stages: Mapping[int, nn.Module], actions: Sequence[Action], group: dist.ProcessGroup,
        reducers: Mapping[int, Sequence[Reducer]], turn_to: Callable[[int], None] = lambda _: None,
    ) -> None:  # fmt: skip
        super().__init__(stages, actions, group)
        self.reducers, self.turn_to = reducers, turn_to
        # The last backward of each stage: later ones overwrite earlier ones.
        self.last_microbatch = {action.stage: action.microbatch for action in actions if action.kind != "forward"}

    def _forward(self, action: Action) -> None:
        self.turn_to(action.microbatch)
        super()._forward(action)

    def _backward(self, action: Action) -> None:
        with self.reducing(action):
            super()._backward(action)

    @contextmanager
    def reducing(self, action: Action) -> Iterator[None]:
        """Wrap a backward pass."""
        self.turn_to(action.microbatch)  # a layer may be computed again
        last = self.is_last(action)
        with ExitStack() as stack:
            for reducer in self.reducers[action.stage]:
                stack.enter_context(reducer.microbatch(last=last))
            yield

    def is_last(self, action: Action) -> bool:
        """Return whether this action completes the gradients of its stage."""
        return action.microbatch == self.last_microbatch[action.stage]
