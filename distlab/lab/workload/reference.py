"""One process, the whole batch, nothing clever: what every strategy has to equal."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from distlab.lab.config import Config
from distlab.lab.workload.data import Batches, Microbatch
from distlab.lab.workload.model import Model
from distlab.lab.workload.optimizer import make_optimizer, named_tensors

# Of the square root of a type's unit: of 1000 tokens some are so near to another choice, of which rounding turns none
# or one.
TILT = 1.0

Loss: TypeAlias = Callable[[Any, Tensor, Tensor], Tensor]  # (model, inputs, targets): the sum over all loss terms


class Snapshot(NamedTuple):
    """What is left after a step: copies under dense names."""

    loss: float  # mean over the terms of the global batch, before the update
    gradients: dict[str, Tensor]  # as the optimizer saw them: after clipping
    weights: dict[str, Tensor]  # after the update
    optimizer: dict[str, Tensor]
    norm: float  # of all gradients before clipping; 0 where nothing is clipped


class Reference:
    """One process that trains `model` in place, a step a call.

    Args:
        loss: of a part of the batch; by default what the model returns.
        masters: float32 copies of the weights are stepped, and rounded into `model` after each step.
    """

    def __init__(self, model: nn.Module, config: Config, *, loss: Loss | None = None, masters: bool = False) -> None:
        self.model, self.clip, self.loss = model, config.clip, loss
        self.trained = [each for each in model.parameters() if each.requires_grad]
        self.masters = [nn.Parameter(each.detach().float()) for each in self.trained] if masters else []
        self.optimizer = make_optimizer(self.masters or self.trained, config)
        self.norm = 0.0

    def step(self, parts: Sequence[Microbatch]) -> float:
        """Train on a batch that comes in `parts`; returns its loss before the update."""
        loss, self.norm = backward(self.model, parts, self.clip, self.loss)
        for weight, master in zip(self.trained, self.masters, strict=False):
            master.grad = None if weight.grad is None else weight.grad.float()
        self.optimizer.step()
        with torch.no_grad():
            for weight, master in zip(self.trained, self.masters, strict=False):
                weight.copy_(master)
        return loss

    def copies(self, kind: str, device: torch.device | None = None) -> dict[str, Tensor]:
        """The "gradients" of the last step, the "weights" or the "optimizer" state; on `device`, by default the
        model's."""
        found = named_tensors(self.model, self.optimizer, kind)
        return {name: each.to(device or each.device, copy=True) for name, each in found}

    def snapshot(self, loss: float, device: torch.device | None = None) -> Snapshot:
        """What the last step, which had this `loss`, has left."""
        gradients, weights, state = (self.copies(kind, device) for kind in ("gradients", "weights", "optimizer"))
        return Snapshot(loss, gradients, weights, state, self.norm)


def backward(
    model: nn.Module, parts: Sequence[Microbatch], clip: float | None, loss: Loss | None = None
) -> tuple[float, float]:
    """Leave the gradient of a batch that comes in `parts` in the model's parameters, clipped to `clip`.

    Returns its loss, and the norm of the gradient before it is clipped, 0 where it is not.
    """
    if isinstance(model, Model):
        model.recompute = False  # or the proof of LAB_RECOMPUTE would hold a mistake against itself
    model.zero_grad()
    total = 0.0
    for inputs, targets, share in parts:
        of_part = (model(inputs, targets) if loss is None else loss(model, inputs, targets)) * share
        of_part.backward()
        total += of_part.item()
    return total, 0.0 if clip is None else nn.utils.clip_grad_norm_(model.parameters(), clip).item()


@torch.no_grad()
def fill(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Give the model these weights, by name, rounded to its type."""
    for name, parameter in model.named_parameters():
        if name in weights:
            parameter.copy_(weights[name])


def train(model: Model, batches: Batches, config: Config, steps: int) -> Iterator[Snapshot]:
    """Train `model` in place for `steps` steps; yields a Snapshot after each."""
    reference = Reference(model, config)
    for step in range(steps):
        yield reference.snapshot(reference.step(batches.alone(step)))


class Losses(NamedTuple):
    """A training of which the losses alone are kept, and the gradient of the first step."""

    values: list[float]  # mean over the terms of the global batch, before each update
    first: dict[str, Tensor]  # after clipping


def losses(
    model: Model, batches: Batches, config: Config, steps: int, *, masters: bool = False, parts: int = 1
) -> Losses:
    """Train as `train` does, and keep no more than is asked of a long training; each batch is added up in so many
    `parts`: the same numbers, rounded otherwise."""
    reference = Reference(model, config, masters=masters)
    values: list[float] = []
    first: dict[str, Tensor] = {}
    for step in range(steps):
        given = divided(batches.full(step), parts) if model.divisible else batches.alone(step)
        values.append(reference.step(given))
        first = first or reference.copies("gradients")
    return Losses(values, first)


def divided(whole: Microbatch, parts: int) -> list[Microbatch]:
    """A batch as `parts` microbatches, or as many as it has samples."""
    count = min(parts, len(whole.inputs))
    pairs = zip(whole.inputs.tensor_split(count), whole.targets.tensor_split(count), strict=True)
    return [Microbatch(inputs, targets, whole.share) for inputs, targets in pairs]


@torch.no_grad()
def move_by_a_unit(model: Model, seed: int) -> None:
    """Move every weight by one unit in its last place, up or down as `seed` draws it; zeros stay zero.

    What is chosen between two that rounding may swap (`tilt`) is tilted to the other one.
    """
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        signs = torch.randint(0, 2, parameter.shape, generator=generator).to(parameter.device) * 2 - 1
        parameter.add_(parameter.abs() * signs.to(parameter.dtype), alpha=torch.finfo(parameter.dtype).eps)
    for part in model.modules():
        if hasattr(part, "tilt"):
            chooser: Any = part
            chooser.tilt = TILT * math.sqrt(torch.finfo(parameter.dtype).eps)
