"""The parts that all pipeline variants share: stages, tied gradients, the optimizer, and dense tensors on rank 0.

Variants differ only in the order of their work (`Engine`). Everything else is the same: this rank's stages, tied
gradients summed over the ranks that have them, one global norm for clipping.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distlab.lab.config import Config
from distlab.lab.workload.data import Microbatch
from distlab.lab.workload.model import Model
from distlab.lab.workload.optimizer import PartitionedStrategy
from distlab.techniques.collectives.phases import marked, phase
from distlab.techniques.collectives.point_to_point import Peers, sendable
from distlab.techniques.pipeline_parallel.pipeline import Pipeline
from distlab.techniques.pipeline_parallel.schedules import stages_of

# Stages: a model's layers cut into runs, and which ranks have which parameter afterwards.
#
# Every rank builds the whole model from the seed, keeps its own stages and drops the rest, so initial weights do not
# depend on the cut. Parameters keep their dense names. A weight that two layers share (embedding and output layer) may
# be on two ranks, each with its own copy. Its gradient is then the sum of both copies' gradients, and both ranks must
# compute the same bits, or the copies drift apart (Narayanan et al. 2021, "Megatron-LM", tie them in the same way).


class Stage(nn.Module):
    """A run of layers under their dense names: "layers.3" even if it is the first one here."""

    def __init__(self, layers: dict[int, nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(index): layer for index, layer in layers.items()})

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers.values():
            hidden = layer(hidden)
        return hidden


def divide(num_layers: int, num_stages: int, *, first: int = 0, last: int = 0) -> list[range]:
    """Return the layers of each stage, as even as possible (torch's tensor_split: the first stages get one more).

    The model's `first` and `last` layers are not counted: they go with the first and the last stage. Raises ValueError
    if a stage would be empty.
    """
    counted = num_layers - first - last
    if counted < num_stages:
        raise ValueError(f"{counted} layers are fewer than {num_stages} stages: every stage needs one")
    each, more = divmod(counted, num_stages)
    ends = [first + each * stage + min(stage, more) for stage in range(num_stages + 1)]
    ends[0], ends[-1] = 0, num_layers
    return [range(begin, end) for begin, end in pairwise(ends)]


@dataclass(frozen=True)
class Parts:
    """One rank's part of a model that was cut into stages, and the ranks of every parameter."""

    stages: dict[int, Stage]  # this rank's, by their number
    parameters: dict[str, nn.Parameter]  # this rank's, by their dense name
    holders: dict[str, tuple[int, ...]]  # of every parameter of the model: the ranks that have it, ascending

    @property
    def layers(self) -> dict[int, nn.Module]:
        """Return this rank's layers, by number in the model."""
        return {int(index): layer for stage in self.stages.values() for index, layer in stage.layers.items()}

    @property
    def shared(self) -> list[str]:
        """Return the names of the parameters that several ranks have."""
        return [name for name, ranks in self.holders.items() if len(ranks) > 1]


def cut(model: nn.Module, layers: Sequence[nn.Module], runs: list[range], rank: int, owners: Sequence[int]) -> Parts:
    """Return rank `rank`'s part of `model`, whose parameters are all in `layers`; stage s goes to rank `owners[s]`."""
    names = {parameter: name for name, parameter in model.named_parameters()}  # a tied one by its first name
    modules = {stage: [layers[index] for index in run] for stage, run in enumerate(runs)}
    parameters_of = {
        owner: {
            parameter
            for stage in stages_of(owner, owners)
            for layer in modules[stage]
            for parameter in layer.parameters()
        }
        for owner in range(max(owners) + 1)
    }
    return Parts(
        {stage: Stage(dict(zip(runs[stage], modules[stage], strict=True))) for stage in stages_of(rank, owners)},
        {name: parameter for parameter, name in names.items() if parameter in parameters_of[rank]},
        {
            name: tuple(owner for owner in parameters_of if parameter in parameters_of[owner])
            for parameter, name in names.items()
        },
    )


def sum_shared(parts: Parts, peers: Peers) -> None:
    """Sum the gradients of shared parameters over exactly the ranks that have them, in rank order.

    Each rank sends its gradient to the others and adds all of them: in the same order, so to the same bits.
    """
    for name in parts.shared:
        ranks, tag = parts.holders[name], peers.new_tag()
        if peers.rank not in ranks:
            continue
        gradient = parts.parameters[name].grad
        if gradient is None:
            raise ValueError(f"{name} has no gradient on rank {peers.rank}: its stage does not use it")
        others = [rank for rank in ranks if rank != peers.rank]
        with phase("all_reduce"):
            copies = dict(zip(others, exchange(peers, tag, gradient, others), strict=True)) | {peers.rank: gradient}
            total = copies[ranks[0]].clone()
            for rank in ranks[1:]:
                total += copies[rank]
            gradient.copy_(total)


def exchange(peers: Peers, tag: int, tensor: Tensor, others: list[int]) -> list[Tensor]:
    """Send this rank's tensor to `others` and return theirs, all of one shape."""
    mine = sendable(tensor, peers)
    received_copies = [torch.empty_like(mine) for _ in others]
    received, sent = peers.post(
        tag, list(zip(others, received_copies, strict=True)), [(other, mine) for other in others]
    )
    for message in (*received, *sent):
        message.wait()
    return [copy.to(tensor.device) for copy in received_copies]


# Engines: how the microbatches of a step go through the stages.
#
# This one runs any of our schedules; the pipeline lesson has one by hand and one of PyTorch's.


class Engine(Protocol):
    """What a step of the strategy runs."""

    @property
    def most_in_flight(self) -> int | None:
        """Return the most microbatches that this rank has kept for their backward pass so far; None if not counted."""

    def step(self, microbatches: list[Microbatch]) -> Tensor | None:
        """Add all microbatches' gradients to the parameters' own; return the mean loss on the last stage's rank."""


Prepare: TypeAlias = Callable[[list[Microbatch]], list[Microbatch]]


class ByHand:
    """Our own pipeline; `prepare` turns a replica's microbatches into those that this rank works on."""

    def __init__(self, pipeline: Pipeline, loss: nn.Module, prepare: Prepare = lambda each: each) -> None:
        self.pipeline, self.loss, self.prepare = pipeline, loss, prepare

    @property
    def most_in_flight(self) -> int:
        return self.pipeline.most_in_flight

    def step(self, microbatches: list[Microbatch]) -> Tensor | None:
        microbatches = self.prepare(microbatches)

        def loss(index: int, output: Tensor) -> Tensor:
            weighted: Tensor = self.loss(output, microbatches[index].targets) * microbatches[index].share
            return weighted

        return self.pipeline.step([microbatch.inputs for microbatch in microbatches], loss)


class Lesson:
    """The pipeline of a lesson.py; its passes are marked and its microbatches counted from outside. `arguments` follow
    the microbatches in calls of its step."""

    def __init__(self, pipeline: Any, *arguments: Any) -> None:
        self.pipeline, self.arguments, self.most_in_flight = pipeline, arguments, 0
        pipeline.stage.register_forward_hook(self._passed)

    def step(self, microbatches: list[Microbatch]) -> Tensor | None:
        with marked(self.pipeline.stage):
            loss: Tensor | None = self.pipeline.step(microbatches, *self.arguments)
        return loss

    def _passed(self, *_: Any) -> None:
        self.most_in_flight = max(self.most_in_flight, len(self.pipeline.saved) + 1)


def joined(microbatches: list[Microbatch]) -> Microbatch:
    """Return all microbatches as one; they belong to one batch, so they have one share."""
    inputs = torch.cat([microbatch.inputs for microbatch in microbatches])
    targets = torch.cat([microbatch.targets for microbatch in microbatches])
    return Microbatch(inputs, targets, microbatches[0].share)


class Pipelined(PartitionedStrategy):
    """A Strategy: `parts` are this rank's stages, `engine` sends microbatches through them."""

    def __init__(self, parts: Parts, engine: Engine, group: dist.ProcessGroup, config: Config) -> None:
        super().__init__(parts.parameters, parts.layers, group, config)
        self.parts, self.engine = parts, engine

    def backward(self, microbatches: list[Microbatch]) -> Tensor | None:
        """Run a step; every rank gets the whole batch: the first stage reads its inputs, the last its targets."""
        for parameter in self.parts.parameters.values():
            parameter.grad = None
        loss = self.engine.step(microbatches)
        sum_shared(self.parts, self.peers)
        return loss

    def counts(self, name: str, tensor: Tensor) -> bool:  # noqa: ARG002
        """Return whether this rank is the first of those that have the parameter: a tied one is on two."""
        return self.parts.holders[name][0] == self.peers.rank

    def dense_names(self) -> Iterable[str]:
        return self.parts.holders


def runs_of(name: str, num_layers: int, num_stages: int) -> list[range]:
    """Return the layers of each stage: gpt's embedding goes with the first block, its head with the last."""
    ends = 1 if name == "gpt" else 0
    return divide(num_layers, num_stages, first=ends, last=ends)


def parts_of(model: Model, group: dist.ProcessGroup, owners: Sequence[int] = ()) -> Parts:
    """Return this rank's stages; stage s is on rank `owners[s]`, by default one stage per rank."""
    owners = owners or range(group.size())
    runs = runs_of(model.name, len(model.layers), len(owners))
    return cut(model, list(model.layers), runs, group.rank(), owners)
