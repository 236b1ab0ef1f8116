"""The pipeline: does a schedule's actions with real layers, whatever the schedule is.

Each rank goes down its list. A forward takes its input from the stage before, keeps input and output for the backward
pass, and gives the output on; a backward takes the gradient of that output, runs autograd through the stage, and gives
the gradient of the input back. Of a schedule that splits its backward passes the first part gives that gradient back,
and the second one adds those of the weights. What was kept goes with its backward, so a schedule's order alone decides
how much a rank holds. Losses are what the caller's function returns for a microbatch: weighed by their share of the
batch, microbatches of any sizes add up to the gradient of the whole.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from workers.parallel.boundaries import Boundaries
from workers.parallel.engine import run_back
from workers.parallel.peers import Peers
from workers.parallel.phases import phase
from workers.parallel.schedules import Action
from workers.parallel.split_backward import LeftOver, SplitBackward, finish

# (microbatch, output of the last stage) -> the scalar that is differentiated
Loss = Callable[[int, Tensor], Tensor]


class Pipeline:
    """One rank of a pipeline; gradients are added to those that its parameters have.

    Args:
        stages: this rank's, by their number; every rank has as many. The first dimension of all that passes between
            them counts samples. Where the schedule splits backward passes their linear layers learn to do so.
        actions: this rank's part of a schedule.
        group: the ranks of the pipeline.
        boundaries: how tensors pass between stages.
        owners: the rank of each stage; by default stage s is on rank s % p.
    """

    def __init__(
        self, stages: Mapping[int, nn.Module], actions: Sequence[Action], group: dist.ProcessGroup,
        boundaries: type[Boundaries] = Boundaries, owners: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        self.stages, self.actions = stages, actions
        self.last = len(stages) * group.size() - 1
        self.boundaries = boundaries(Peers(group), owners or [*range(group.size())] * len(stages))
        halved = any(action.kind == "weight" for action in actions)
        self.splits = {number: SplitBackward(stage) for number, stage in stages.items()} if halved else {}
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
        self._parts: dict[tuple[int, int], list[LeftOver]] = {}  # what is left to do for the weights
        self._losses: list[Tensor] = []
        self.boundaries.begin(self.actions, [len(microbatch) for microbatch in inputs])
        for action in self.actions:
            if action.kind == "forward":
                self._forward(action)
            elif action.kind == "weight":
                self._weight(action)
            else:
                self._backward(action)
        self.boundaries.finish()
        losses = self._losses
        del self._inputs, self._loss, self._losses  # the batch, which nobody needs between two steps
        return torch.stack(losses).sum() if losses else None

    def _forward(self, action: Action) -> None:
        stage, microbatch = action.stage, action.microbatch
        hidden = self.boundaries.take(action).requires_grad_() if stage else self._inputs[microbatch]
        with phase("forward", str(microbatch)):
            output: Tensor = self.stages[stage](hidden)
            if stage == self.last:
                output = self._loss(microbatch, output)
                self._losses.append(output.detach())
        self._held[stage, microbatch] = hidden, output
        if self.splits:
            self._parts[stage, microbatch] = self.splits[stage].taken()
        # Where there are parts, each outlives what is held of its microbatch.
        self.most_in_flight = max(self.most_in_flight, len(self._parts if self.splits else self._held))
        self.boundaries.give(action, output.detach())

    def _backward(self, action: Action) -> None:
        gradient = self.boundaries.take(action) if action.stage < self.last else None
        hidden, output = self._held.pop((action.stage, action.microbatch))
        with phase(action.kind, str(action.microbatch)):
            run_back((output,), (torch.ones_like(output) if gradient is None else gradient,))
        if hidden.grad is not None:
            self.boundaries.give(action, hidden.grad)

    def _weight(self, action: Action) -> None:
        with phase("weight", str(action.microbatch)):
            finish(self._parts.pop((action.stage, action.microbatch)))
