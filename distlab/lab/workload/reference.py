"""One process, the whole batch, nothing clever: what every strategy has to equal."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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


LEARNING_RATE = 0.01  # of a proof: small, since a step that overshoots makes rounding errors grow from step to step


def plain(config: Config, **more: Any) -> Config:
    """These settings with the optimizer of a proof, plain SGD: Adam would divide an error of scale away."""
    return config.model_copy(update={"optimizer": "sgd", "clip": None, "lr": LEARNING_RATE} | more)


class OneProcess:
    """One process that trains `model` in place, a step a call, by no line of a technique.

    Args:
        loss: of a part of the batch; by default what the model returns.
        masters: float32 copies of the weights are stepped, and rounded into `model` after each step.
    """

    def __init__(self, model: nn.Module, config: Config, *, loss: Loss | None = None, masters: bool = False) -> None:
        self.model, self.config, self.loss_of = model, config, loss
        self.loss = self.norm = 0.0  # of the last step: its loss before the update, and the gradient's before a clip
        self.trained = [each for each in model.parameters() if each.requires_grad]
        self.masters = [nn.Parameter(each.detach().float()) for each in self.trained] if masters else []
        self.optimizer = make_optimizer(self.masters or self.trained, config)

    def step(self, parts: Sequence[Microbatch]) -> float:
        """Train on a batch that comes in `parts`; returns its loss before the update."""
        self.loss, self.norm = backward(self.model, parts, self.config.clip, self.loss_of)
        self._update()
        return self.loss

    def step_by(self, sums: Iterable[Tensor]) -> dict[str, Tensor]:
        """Take a step by these gradients, one a parameter; returns the weights by name."""
        for parameter, gradient in zip(self.trained, sums, strict=True):
            parameter.grad = gradient.view_as(parameter)
        self._update()
        return self.copies("weights")

    def _update(self) -> None:
        for weight, master in zip(self.trained, self.masters, strict=False):
            master.grad = None if weight.grad is None else weight.grad.float()
        self.optimizer.step()
        with torch.no_grad():
            for weight, master in zip(self.trained, self.masters, strict=False):
                weight.copy_(master)

    def copies(self, kind: str, device: torch.device | None = None) -> dict[str, Tensor]:
        """The "gradients" of the last step, the "weights" or the "optimizer" state; on `device`, by default the
        model's."""
        found = named_tensors(self.model, self.optimizer, kind)
        return {name: each.to(device or each.device, copy=True) for name, each in found}

    def snapshot(self, device: torch.device | None = None) -> Snapshot:
        """What the last step has left."""
        gradients, weights, state = (self.copies(kind, device) for kind in ("gradients", "weights", "optimizer"))
        return Snapshot(self.loss, gradients, weights, state, self.norm)


def gradients(
    model: nn.Module, parts: Sequence[Microbatch], weights: Mapping[str, Tensor] | None = None
) -> tuple[float, list[Tensor]]:
    """The loss of a batch that comes in `parts`, and its gradient, at these `weights` by name or at the model's own."""
    fill(model, weights or {})
    loss, _ = backward(model, parts, None)
    return loss, gradients_of(model)


def gradients_of(model: nn.Module) -> list[Tensor]:
    """The gradient of each parameter, zeros where it has none."""
    return [torch.zeros_like(each) if each.grad is None else each.grad for each in model.parameters()]


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
    for one in stepped(model, batches, config, steps):
        yield one.snapshot()


def stepped(
    model: Model, batches: Batches, config: Config, steps: int, *, masters: bool = False, parts: int = 1
) -> Iterator[OneProcess]:
    """The one process after each of so many steps; each batch is added up in so many `parts`: the same numbers, rounded
    otherwise."""
    one = OneProcess(model, config, masters=masters)
    for step in range(steps):
        one.step(divided(batches.full(step), parts) if model.divisible else batches.alone(step))
        yield one


class Losses(NamedTuple):
    """A training of which the losses alone are kept, and the gradient of the first step."""

    values: list[float]  # mean over the terms of the global batch, before each update
    first: dict[str, Tensor]  # after clipping


def losses(
    model: Model, batches: Batches, config: Config, steps: int, *, masters: bool = False, parts: int = 1
) -> Losses:
    """Train as `train` does, and keep no more than is asked of a long training."""
    kept = Losses([], {})
    for one in stepped(model, batches, config, steps, masters=masters, parts=parts):
        kept.values.append(one.loss)
        kept.first.update({} if kept.first else one.copies("gradients"))
    return kept


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
