"""A pipeline over which gradients are summed: each stage's in the last backward pass that goes through it.

Data parallelism sums a step's gradients once, and begins while the backward pass still runs. In a pipeline a step
has many backward passes, and only a stage's last one leaves its gradients complete: what is summed before is a part
of them, on every rank another part, and no error says so. Armed around the whole schedule, buckets are launched by
the first microbatch's gradients. So whoever sums is told of each backward pass, and which is the last (Narayanan et
al. 2021, "Megatron-LM", section 3, sums after the whole pipeline; its later releases as here).

The ranks along the data-parallel axis go down one list of actions, so their sums meet in one order.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Protocol

import torch.distributed as dist
from torch import nn

from distlab.techniques.pipeline_parallel.pipeline import Pipeline
from distlab.techniques.pipeline_parallel.schedules import Action


class Reducer(Protocol):
    """How some parameters' gradients become one over all replicas, and whatever is kept of them."""

    def begin(self) -> None:
        """Before the first microbatch."""

    def microbatch(self, *, last: bool) -> AbstractContextManager[None]:
        """Around the backward pass of a microbatch."""

    def finish(self) -> None:
        """After the last one: every gradient is the sum over all replicas."""


class ReducingPipeline(Pipeline):
    """`Pipeline`, whose stages' gradients `reducers` sum; `turn_to` hears which microbatch is worked on next."""

    def __init__(
        self, stages: Mapping[int, nn.Module], actions: Sequence[Action], group: dist.ProcessGroup,
        reducers: Mapping[int, Sequence[Reducer]], turn_to: Callable[[int], None] = lambda _: None,
    ) -> None:  # fmt: skip
        super().__init__(stages, actions, group)
        self.reducers, self.turn_to = reducers, turn_to
        # The last one of each stage: a later one takes the place of those before.
        self.last_microbatch = {action.stage: action.microbatch for action in actions if action.kind != "forward"}

    def _forward(self, action: Action) -> None:
        self.turn_to(action.microbatch)
        super()._forward(action)

    def _backward(self, action: Action) -> None:
        with self.told(action):
            super()._backward(action)

    @contextmanager
    def told(self, action: Action) -> Iterator[None]:
        """Around a backward pass."""
        self.turn_to(action.microbatch)  # a layer may be computed again
        last = self.is_last(action)
        with ExitStack() as stack:
            for reducer in self.reducers[action.stage]:
                stack.enter_context(reducer.microbatch(last=last))
            yield

    def is_last(self, action: Action) -> bool:
        """Whether the stage's gradients are complete with it."""
        return action.microbatch == self.last_microbatch[action.stage]
