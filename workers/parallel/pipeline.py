"""The pipeline: does a schedule's actions with real layers, whatever the schedule is.

Each rank goes down its list. A forward takes its input from the stage before, keeps input and output for the backward
pass, and gives the output on; a backward takes the gradient of that output, runs autograd through the stage, and gives
the gradient of the input back. What was kept goes with its backward, so a schedule's order alone decides how much a
rank holds. Losses are what the caller's function returns for a microbatch: weighed by their share of the batch,
microbatches of any sizes add up to the gradient of the whole.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from workers.parallel.boundaries import Boundaries
from workers.parallel.peers import Peers
from workers.parallel.phases import phase
from workers.parallel.schedules import Action

# (microbatch, output of the last stage) -> the scalar that is differentiated
Loss = Callable[[int, Tensor], Tensor]


class Pipeline:
    """One rank of a pipeline; gradients are added to those that its parameters have.

    Args:
        stages: this rank's, by their number; every rank has as many, and stage s is on rank s % p. The first dimension
            of all that passes between them counts samples.
        actions: this rank's part of a schedule.
        group: the ranks of the pipeline.
        boundaries: how tensors pass between stages.
    """

    def __init__(
        self, stages: Mapping[int, nn.Module], actions: Sequence[Action], group: dist.ProcessGroup,
        boundaries: type[Boundaries] = Boundaries,
    ) -> None:  # fmt: skip
        self.stages, self.actions = stages, actions
        self.last = len(stages) * group.size() - 1
        self.boundaries = boundaries(Peers(group), self.last + 1)
        self.agreed = False
        self.most_in_flight = 0  # microbatches between forward and backward, each chunk's apart, at most so far

    def step(self, inputs: Sequence[Tensor], loss: Loss) -> Tensor | None:
        """Forward and backward of all microbatches; returns the sum of losses, detached, where the last stage is.

        `inputs` are all microbatches' on every rank, though only their sizes count beyond the first stage. A message
        that fails raises RuntimeError naming its rank.
        """
        if not self.agreed:
            self.boundaries.agree(self.stages, inputs[0][:1])
            self.agreed = True
        self._inputs, self._loss = inputs, loss
        self._held: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}  # (stage, microbatch): input and output
        self._losses: list[Tensor] = []
        self.boundaries.begin(self.actions, [len(microbatch) for microbatch in inputs])
        for action in self.actions:
            if action.kind == "forward":
                self._forward(action)
            else:
                self._backward(action)
        self.boundaries.finish()
        return torch.stack(self._losses).sum() if self._losses else None

    def _forward(self, action: Action) -> None:
        stage, microbatch = action.stage, action.microbatch
        hidden = self.boundaries.take(action).requires_grad_() if stage else self._inputs[microbatch]
        with phase("forward", str(microbatch)):
            output: Tensor = self.stages[stage](hidden)
            if stage == self.last:
                output = self._loss(microbatch, output)
                self._losses.append(output.detach())
        self._held[stage, microbatch] = hidden, output
        self.most_in_flight = max(self.most_in_flight, len(self._held))
        self.boundaries.give(action, output.detach())

    def _backward(self, action: Action) -> None:
        gradient = self.boundaries.take(action) if action.stage < self.last else None
        hidden, output = self._held.pop((action.stage, action.microbatch))
        with phase("backward", str(action.microbatch)):
            torch.autograd.backward(output, gradient)
        if hidden.grad is not None:
            self.boundaries.give(action, hidden.grad)
