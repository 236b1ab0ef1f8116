"""What a rank trains: a prepared module with train_step, or a strategy, and what is left of each of its steps.

Gradients are taken as the optimizer is about to step, by a hook of its own: after all that train_step does with them,
and before zero_grad takes them away.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distlab.mesh.grid import Mesh
from distlab.prove.reference import LEARNING_RATE, WHOLE, Misfit, Rows, local, locate_in_dense, named, names_of
from distlab.prove.user_file import Refused, UserFile
from distlab.workload.data import Microbatch

Unseen: TypeAlias = Callable[[], AbstractContextManager[None]]  # what runs in it is no call of the file's


class LocatedTensor(NamedTuple):
    """One tensor of a rank, and where in the dense model it lies."""

    rows: Rows
    tensor: Tensor | None  # None: a gradient that is not there


class Trainee(Protocol):
    """One rank's training."""

    misfits: dict[str, str]  # parameters that are no part of the model's, and how

    def step(self, microbatches: list[Microbatch]) -> float | None:
        """One step; the rank's share of the loss, None where it sees none."""

    def gradients(self) -> dict[str, LocatedTensor]:
        """As the optimizer saw them in the step before, by the names that they have here."""

    def weights(self) -> dict[str, LocatedTensor]:
        """As they are now."""


class Stepped:
    """The file's train_step, or the lab's, on what the file's prepare made of the model."""

    def __init__(
        self, theirs: UserFile, model: nn.Module, group: Any, start: Mapping[str, Tensor], unseen: Unseen
    ) -> None:
        self.theirs, self.group, self._unseen = theirs, group, unseen
        self._canonical = names_of(model)
        self.module = theirs["prepare"](model, group) if "prepare" in theirs else model
        if not isinstance(self.module, nn.Module):
            raise Refused(
                f"prepare(model, group) returned a {type(self.module).__name__}: expected the nn.Module that is trained"
            )
        trained = [each for each in self.module.parameters() if each.requires_grad]
        self.optimizer = torch.optim.SGD(trained, lr=LEARNING_RATE)
        self.optimizer.register_step_pre_hook(lambda *_: self._seen())
        self._gradients: dict[str, LocatedTensor] = {}
        self._steps = 0
        self.misfits: dict[str, str] = {}
        with unseen():
            self._rows = self._placed(start)

    def _placed(self, start: Mapping[str, Tensor]) -> dict[str, Rows]:
        """Where each of this rank's parameters lies, by the name that it has here."""
        found = {}
        for name, parameter in named(self.module).items():
            if name not in self._canonical:
                raise Refused(
                    f"prepare(model, group) returned a module with a parameter {name!r}, which the model does not have:"
                    " names have to stay, whatever is cut or wrapped"
                )
            try:
                found[name] = locate_in_dense(local(parameter), start[self._canonical[name]])
            except Misfit as misfit:
                self.misfits[name] = str(misfit)
        return found

    def step(self, microbatches: list[Microbatch]) -> float | None:
        """By the file's train_step; raises Refused where it does not step its optimizer once."""
        before = self._steps
        if "train_step" in self.theirs:
            share = self.theirs["train_step"](self.module, self.optimizer, microbatches, self.group)
        else:
            share = train_step(self.theirs, self.module, self.optimizer, microbatches, self.group)
        if self._steps - before != 1:
            raise Refused(
                f"train_step called optimizer.step() {self._steps - before} times in a step: expected once, since a"
                " proof compares what the optimizer sees"
            )
        return None if share is None else float(share)

    def _seen(self) -> None:
        self._steps += 1
        with self._unseen():
            self._gradients = {
                name: LocatedTensor(self._rows[name], None if each.grad is None else local(each.grad).clone())
                for name, each in named(self.module).items()
                if name in self._rows and each.requires_grad
            }

    def gradients(self) -> dict[str, LocatedTensor]:
        return self._gradients

    def weights(self) -> dict[str, LocatedTensor]:
        with self._unseen():
            return {
                name: LocatedTensor(self._rows[name], local(each).clone())
                for name, each in named(self.module).items()
                if name in self._rows
            }


class OfStrategy:
    """The file's strategy: what `full` gives on this rank, which holds it whole."""

    def __init__(self, theirs: UserFile, model: nn.Module, mesh: Mesh, unseen: Unseen) -> None:
        self._unseen, self._clips = unseen, theirs.found.get("clip") is not None
        plain = {"optimizer": "sgd", "clip": theirs.found.get("clip"), "lr": LEARNING_RATE, "bucket_mib": 0.01}
        self.strategy = theirs["strategy"](model, mesh, theirs.config.model_copy(update=plain))
        self.misfits: dict[str, str] = {}
        self._gradients: dict[str, LocatedTensor] = {}
        self._weights: dict[str, LocatedTensor] = {}

    def step(self, microbatches: list[Microbatch]) -> float | None:
        share = self.strategy.backward(microbatches)
        if not self._clips:
            self._gradients = self._full("gradients")
        self.strategy.update()
        if self._clips:  # in `update`, and the gradients stay
            self._gradients = self._full("gradients")
        self._weights = self._full("weights")
        return None if share is None else float(share)

    def _full(self, kind: str) -> dict[str, LocatedTensor]:
        with self._unseen():
            full = self.strategy.full(kind)
            return {name: LocatedTensor(WHOLE, each.detach().clone()) for name, each in full if each.numel()}

    def gradients(self) -> dict[str, LocatedTensor]:
        return self._gradients

    def weights(self) -> dict[str, LocatedTensor]:
        return self._weights


def train_step(
    theirs: UserFile, model: nn.Module, optimizer: torch.optim.Optimizer, microbatches: list[Microbatch],
    group: dist.ProcessGroup,
) -> float:  # fmt: skip
    """The lab's own, where the file has none: each gradient summed over all ranks."""
    optimizer.zero_grad()
    total = 0.0
    for inputs, targets, share in microbatches:
        loss = theirs.loss(model, inputs, targets) * share
        loss.backward()
        total += loss.item()
    for parameter in model.parameters():
        if parameter.requires_grad:
            if parameter.grad is None:  # every rank makes the same calls
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad, group=group)
    clip = theirs.found.get("clip")
    if clip is not None:
        nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    theirs.after_step(model)
    return total


# Where each rank stands in the file's mesh: the last axis innermost, as in a DeviceMesh.


@dataclass(frozen=True)
class Grid:
    """Axes and sizes."""

    axes: Mapping[str, int]

    def index(self, rank: int, axis: str) -> int:
        """A rank's place along an axis; 0 along one that is not there."""
        return self._places(rank).get(axis, 0)

    def neighbours(self, rank: int) -> dict[str, Sequence[int]]:
        """Along each axis the ranks that differ in it alone, this one among them."""
        own = self._places(rank)
        return {
            axis: [other for other in range(self.size) if self._places(other) == own | {axis: self.index(other, axis)}]
            for axis in self.axes
        }

    @property
    def size(self) -> int:
        """Of all axes."""
        return math.prod(self.axes.values())

    def _places(self, rank: int) -> dict[str, int]:
        places = {}
        for axis in reversed(list(self.axes)):
            rank, places[axis] = divmod(rank, self.axes[axis])
        return {axis: places[axis] for axis in self.axes}
