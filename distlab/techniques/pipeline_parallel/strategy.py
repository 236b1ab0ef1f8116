"""What every pipelined variant shares: its part of the model, gradients in place, an optimizer, and the way to rank 0.

A variant differs in one thing only: the order of its work (`Engine`). Everything else is the same for all: this rank's
stages, tied gradients summed over the ranks that hold them, one global norm to clip by.
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
from distlab.lab.workload.optimizer import HoldsParts
from distlab.techniques.collectives.phases import marked, phase
from distlab.techniques.collectives.point_to_point import Peers, sendable
from distlab.techniques.pipeline_parallel.pipeline import Pipeline
from distlab.techniques.pipeline_parallel.schedules import stages_of

# Stages: a model's layers cut into runs, and who holds which parameter afterwards.
#
# Every rank builds the whole model from the seed, keeps its own stages and lets the rest go, so that nothing differs
# by initialisation. Parameters keep their dense names. A weight that two layers share (the embedding and the output
# layer) may end up on two ranks, each with a copy of its own: its gradient is then the sum of both copies' gradients,
# and both ranks must come to the same bits, or the copies drift apart (Narayanan et al. 2021, "Megatron-LM", ties
# them so too).


class Stage(nn.Module):
    """A run of layers under their dense names, "layers.3" even if it is the first one here."""

    def __init__(self, layers: dict[int, nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(index): layer for index, layer in layers.items()})

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers.values():
            hidden = layer(hidden)
        return hidden


def divide(num_layers: int, num_stages: int, *, first: int = 0, last: int = 0) -> list[range]:
    """The layers of each stage, as even as it goes (torch's tensor_split: the first stages one more).

    The `first` and `last` layers of the model do not count: they go with the first and the last stage. Raises
    ValueError if a stage would stay empty.
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
    """What a rank holds of a model that was cut, and what all hold."""

    stages: dict[int, Stage]  # this rank's, by their number
    parameters: dict[str, nn.Parameter]  # this rank's, by their dense name
    holders: dict[str, tuple[int, ...]]  # of every parameter of the model: the ranks that hold it, ascending

    @property
    def layers(self) -> dict[int, nn.Module]:
        """This rank's layers, by number in the model."""
        return {int(index): layer for stage in self.stages.values() for index, layer in stage.layers.items()}

    @property
    def shared(self) -> list[str]:
        """The parameters that several ranks hold."""
        return [name for name, ranks in self.holders.items() if len(ranks) > 1]


def cut(model: nn.Module, layers: Sequence[nn.Module], runs: list[range], rank: int, owners: Sequence[int]) -> Parts:
    """Rank `rank`'s part of `model`, whose parameters are all in `layers`; stage s goes to rank `owners[s]`."""
    names = {parameter: name for name, parameter in model.named_parameters()}  # a tied one by its first name
    modules = {stage: [layers[index] for index in run] for stage, run in enumerate(runs)}
    held = {
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
        {name: parameter for parameter, name in names.items() if parameter in held[rank]},
        {name: tuple(owner for owner in held if parameter in held[owner]) for parameter, name in names.items()},
    )


def sum_shared(parts: Parts, peers: Peers) -> None:
    """Sum the gradients of shared parameters over exactly the ranks that hold them, in the order of ranks.

    Each rank sends its own to every other holder and adds up all of them: the same order, so the same bits on each.
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
    """The tensors of `others`, all of one shape, in exchange for this rank's."""
    mine = sendable(tensor, peers)
    theirs = [torch.empty_like(mine) for _ in others]
    received, sent = peers.post(tag, list(zip(others, theirs, strict=True)), [(other, mine) for other in others])
    for message in (*received, *sent):
        message.wait()
    return [copy.to(tensor.device) for copy in theirs]


# Engines: how the microbatches of a step go through the stages.
#
# Here is what runs any schedule of ours; the lesson of pipelines has one by hand, and one that is PyTorch's.


class Engine(Protocol):
    """What a step of the strategy runs."""

    @property
    def most_in_flight(self) -> int | None:
        """Microbatches that this rank held for their backward pass, at most so far; None where nobody counts them."""

    def step(self, microbatches: list[Microbatch]) -> Tensor | None:
        """Add all microbatches' gradients to the parameters' own; returns the mean loss where the last stage is."""


Prepare: TypeAlias = Callable[[list[Microbatch]], list[Microbatch]]


class ByHand:
    """Our own pipeline; `prepare` makes of a replica's microbatches those that this rank works on."""

    def __init__(self, pipeline: Pipeline, loss: nn.Module, prepare: Prepare = lambda each: each) -> None:
        self.pipeline, self.loss, self.prepare = pipeline, loss, prepare

    @property
    def most_in_flight(self) -> int:
        return self.pipeline.most_in_flight

    def step(self, microbatches: list[Microbatch]) -> Tensor | None:
        microbatches = self.prepare(microbatches)

        def loss(index: int, output: Tensor) -> Tensor:
            weighed: Tensor = self.loss(output, microbatches[index].targets) * microbatches[index].share
            return weighed

        return self.pipeline.step([microbatch.inputs for microbatch in microbatches], loss)


class Lesson:
    """The pipeline of a lesson.py, whose passes are marked and whose microbatches are counted from outside; `given` is
    what its step takes beside them."""

    def __init__(self, pipeline: Any, *given: Any) -> None:
        self.pipeline, self.given, self.most_in_flight = pipeline, given, 0
        pipeline.stage.register_forward_hook(self._passed)

    def step(self, microbatches: list[Microbatch]) -> Tensor | None:
        with marked(self.pipeline.stage):
            loss: Tensor | None = self.pipeline.step(microbatches, *self.given)
        return loss

    def _passed(self, *_: Any) -> None:
        self.most_in_flight = max(self.most_in_flight, len(self.pipeline.held) + 1)


def joined(microbatches: list[Microbatch]) -> Microbatch:
    """All microbatches as one; they are of one batch, so of one share."""
    inputs = torch.cat([microbatch.inputs for microbatch in microbatches])
    targets = torch.cat([microbatch.targets for microbatch in microbatches])
    return Microbatch(inputs, targets, microbatches[0].share)


class Pipelined(HoldsParts):
    """A Strategy: `parts` are this rank's stages, `engine` what sends microbatches through them."""

    def __init__(self, parts: Parts, engine: Engine, group: dist.ProcessGroup, config: Config) -> None:
        super().__init__(parts.parameters, parts.layers, group, config)
        self.parts, self.engine = parts, engine

    def backward(self, microbatches: list[Microbatch]) -> Tensor | None:
        """Every rank gets the whole batch: the first stage reads its inputs, the last one its targets."""
        for parameter in self.parts.parameters.values():
            parameter.grad = None
        loss = self.engine.step(microbatches)
        sum_shared(self.parts, self.peers)
        return loss

    def counts(self, name: str, tensor: Tensor) -> bool:  # noqa: ARG002
        """On the first of the ranks that hold it: of a tied one there are two."""
        return self.parts.holders[name][0] == self.peers.rank

    def dense_names(self) -> Iterable[str]:
        return self.parts.holders


def runs_of(name: str, num_layers: int, num_stages: int) -> list[range]:
    """The layers of each stage: gpt's embedding goes with the first block and its head with the last."""
    ends = 1 if name == "gpt" else 0
    return divide(num_layers, num_stages, first=ends, last=ends)


def parts_of(model: Model, group: dist.ProcessGroup, owners: Sequence[int] = ()) -> Parts:
    """This rank's stages, of which stage s is on rank `owners[s]`; by default every rank has one."""
    owners = owners or range(group.size())
    runs = runs_of(model.name, len(model.layers), len(owners))
    return cut(model, list(model.layers), runs, group.rank(), owners)
