"""The reference: one process trains on the whole batch. Every strategy must equal it."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from distlab.lab.config import Config
from distlab.lab.workload.data import Batches, Microbatch
from distlab.lab.workload.model import Model
from distlab.lab.workload.optimizer import make_optimizer, named_tensors

# In units of the square root of the dtype's epsilon: some of 1000 tokens have two experts that are so nearly equal, of
# which rounding swaps at most one.
TILT = 1.0

Loss: TypeAlias = Callable[[Any, Tensor, Tensor], Tensor]  # (model, inputs, targets) to the sum over all loss terms


class Snapshot(NamedTuple):
    """The state after a step: copies under dense names."""

    loss: float  # mean over the terms of the global batch, before the update
    gradients: dict[str, Tensor]  # as the optimizer used them, after clipping
    weights: dict[str, Tensor]  # after the update
    optimizer: dict[str, Tensor]
    norm: float  # of all gradients before clipping; 0 without clipping


LEARNING_RATE = 0.01  # of a proof: small, because with larger steps rounding errors grow from step to step


def plain(config: Config, **more: Any) -> Config:
    """Return these settings with a proof's optimizer, plain SGD, because Adam would hide a wrong scale."""
    return config.model_copy(update={"optimizer": "sgd", "clip": None, "lr": LEARNING_RATE} | more)


class OneProcess:
    """Trains `model` in place in one process, without any code of the techniques; each call of `step` is one step.

    Args:
        loss: the loss of a microbatch; by default the model's output.
        masters: whether to step float32 copies of the weights, and round them into `model` after each step.
    """

    def __init__(self, model: nn.Module, config: Config, *, loss: Loss | None = None, masters: bool = False) -> None:
        self.model, self.config, self.loss_of = model, config, loss
        self.loss = self.norm = 0.0  # of the last step: the loss before the update, the gradients' norm before clipping
        self.trained = [each for each in model.parameters() if each.requires_grad]
        self.masters = [nn.Parameter(each.detach().float()) for each in self.trained] if masters else []
        self.optimizer = make_optimizer(self.masters or self.trained, config)

    def step(self, parts: Sequence[Microbatch]) -> float:
        """Train on the microbatches `parts`; returns the loss before the update."""
        self.loss, self.norm = backward(self.model, parts, self.config.clip, self.loss_of)
        self._update()
        return self.loss

    def step_by(self, sums: Iterable[Tensor]) -> dict[str, Tensor]:
        """Take a step with these gradients, one per parameter; returns the weights by name."""
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
        """Return copies of the last step's "gradients", the "weights" or the "optimizer" state, on `device`, or the
        model's."""
        found = named_tensors(self.model, self.optimizer, kind)
        return {name: each.to(device or each.device, copy=True) for name, each in found}

    def snapshot(self, device: torch.device | None = None) -> Snapshot:
        """Return a Snapshot of the last step."""
        gradients, weights, state = (self.copies(kind, device) for kind in ("gradients", "weights", "optimizer"))
        return Snapshot(self.loss, gradients, weights, state, self.norm)


def gradients(
    model: nn.Module, parts: Sequence[Microbatch], weights: Mapping[str, Tensor] | None = None
) -> tuple[float, list[Tensor]]:
    """Return the loss of the microbatches `parts` and its gradients, at these `weights` or at the model's own."""
    fill(model, weights or {})
    loss, _ = backward(model, parts, None)
    return loss, gradients_of(model)


def gradients_of(model: nn.Module) -> list[Tensor]:
    """Return the gradient of each parameter, zeros if it has none."""
    return [torch.zeros_like(each) if each.grad is None else each.grad for each in model.parameters()]


def backward(
    model: nn.Module, parts: Sequence[Microbatch], clip: float | None, loss: Loss | None = None
) -> tuple[float, float]:
    """Compute the gradients of the microbatches `parts` in the model's parameters, clipped to `clip`.

    Returns the loss, and the norm of the gradients before clipping, 0 without clipping.
    """
    if isinstance(model, Model):
        model.recompute = False  # else a mistake in recomputation would be in the reference too
    model.zero_grad()
    total = 0.0
    for inputs, targets, share in parts:
        of_part = (model(inputs, targets) if loss is None else loss(model, inputs, targets)) * share
        of_part.backward()
        total += of_part.item()
    return total, 0.0 if clip is None else nn.utils.clip_grad_norm_(model.parameters(), clip).item()


@torch.no_grad()
def fill(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Copy these weights by name into the model, rounded to its dtype."""
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
    """Yield the process after each step. Each batch is split into `parts`: mathematically equal, but rounded
    differently."""
    one = OneProcess(model, config, masters=masters)
    for step in range(steps):
        one.step(divided(batches.full(step), parts) if model.divisible else batches.alone(step))
        yield one


class Losses(NamedTuple):
    """The losses of a training run, and the gradients of its first step."""

    values: list[float]  # mean over the terms of the global batch, before each update
    first: dict[str, Tensor]  # after clipping


def losses(
    model: Model, batches: Batches, config: Config, steps: int, *, masters: bool = False, parts: int = 1
) -> Losses:
    """Train as `train` does, but keep only the losses and the first gradients, for long training runs."""
    kept = Losses([], {})
    for one in stepped(model, batches, config, steps, masters=masters, parts=parts):
        kept.values.append(one.loss)
        kept.first.update({} if kept.first else one.copies("gradients"))
    return kept


def divided(whole: Microbatch, parts: int) -> list[Microbatch]:
    """Split a batch into `parts` microbatches, at most one per sample."""
    count = min(parts, len(whole.inputs))
    pairs = zip(whole.inputs.tensor_split(count), whole.targets.tensor_split(count), strict=True)
    return [Microbatch(inputs, targets, whole.share) for inputs, targets in pairs]


@torch.no_grad()
def move_by_a_unit(model: Model, seed: int) -> None:
    """Change every weight by one unit in the last place, up or down by a draw from `seed`; zeros stay zero.

    A module with a `tilt` then chooses the other of two options that rounding could swap.
    """
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        signs = torch.randint(0, 2, parameter.shape, generator=generator).to(parameter.device) * 2 - 1
        parameter.add_(parameter.abs() * signs.to(parameter.dtype), alpha=torch.finfo(parameter.dtype).eps)
    for part in model.modules():
        if hasattr(part, "tilt"):
            chooser: Any = part
            chooser.tilt = TILT * math.sqrt(torch.finfo(parameter.dtype).eps)
