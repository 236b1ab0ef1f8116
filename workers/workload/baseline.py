"""One process, the whole batch, nothing clever: what every strategy has to equal."""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from workers.config import Config
from workers.workload.data import Batches, Microbatch
from workers.workload.model import Model
from workers.workload.optimizer import make_optimizer, named_state

# Of the square root of a type's unit: of 1000 tokens some are so near to another choice, of which rounding turns none
# or one.
TILT = 1.0


class Snapshot(NamedTuple):
    """What is left after a step: copies, on the model's device, under dense names."""

    loss: float  # mean over the terms of the global batch, before the update
    gradients: dict[str, Tensor]  # as the optimizer saw them: after clipping
    weights: dict[str, Tensor]  # after the update
    optimizer: dict[str, Tensor]


def train(model: Model, batches: Batches, config: Config, steps: int) -> Iterator[Snapshot]:
    """Train `model` in place for `steps` steps; yields a Snapshot after each."""
    optimizer = make_optimizer(model.parameters(), config)
    for step in range(steps):
        loss = backward(model, batches.alone(step), config)
        optimizer.step()
        yield Snapshot(
            loss=loss,
            gradients={name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None},
            weights={name: p.detach().clone() for name, p in model.named_parameters()},
            optimizer={name: state.clone() for name, state in named_state(model, optimizer)},
        )


def backward(model: Model, parts: list[Microbatch], config: Config) -> float:
    """The loss of a batch that comes in `parts`, and its gradient, clipped by LAB_CLIP, in the model's parameters."""
    model.recompute = False  # or the proof of LAB_RECOMPUTE would hold a mistake against itself
    model.zero_grad()
    total = 0.0
    for inputs, targets, share in parts:
        loss = model(inputs, targets) * share
        loss.backward()
        total += loss.item()
    if config.clip is not None:
        nn.utils.clip_grad_norm_(model.parameters(), config.clip)
    return total


class Losses(NamedTuple):
    """A training of which the losses alone are kept, and the gradient of the first step."""

    values: list[float]  # mean over the terms of the global batch, before each update
    first: dict[str, Tensor]  # after clipping


def losses(
    model: Model, batches: Batches, config: Config, steps: int, *, masters: bool = False, parts: int = 1
) -> Losses:
    """Train as `train` does, and keep no more than is asked of a long training.

    Args:
        masters: float32 copies of the weights are stepped, and rounded into `model` after each step.
        parts: how many each batch is added up in: the same numbers, rounded otherwise.
    """
    computing = list(model.parameters())
    stepped = [nn.Parameter(each.detach().float()) for each in computing] if masters else computing
    optimizer = make_optimizer(stepped, config)
    values: list[float] = []
    first: dict[str, Tensor] = {}
    for step in range(steps):
        given = divided(batches.full(step), parts) if model.divisible else batches.alone(step)
        values.append(backward(model, given, config))
        if not first:
            first = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        if masters:
            for weight, master in zip(computing, stepped, strict=True):
                master.grad = None if weight.grad is None else weight.grad.float()
        optimizer.step()
        if masters:
            with torch.no_grad():
                for weight, master in zip(computing, stepped, strict=True):
                    weight.copy_(master)
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
