"""What strategies share whose optimizer steps a model's own parameters: the passes, the update, and the state by name.

A rank may hold all of the model or a part of it; what it does hold, it holds under the dense model's names, so that a
proof or a checkpoint reads it as it stands.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distlab.collectives.phases import phase
from distlab.config import Config
from distlab.workload.data import Microbatch
from distlab.workload.model import Model
from distlab.workload.optimizer import live_state, make_optimizer, named_tensors


def forward_backward(
    forward: Callable[..., Any], microbatch: Microbatch, number: int, scale: float | None = None
) -> Tensor:
    """Both passes of microbatch `number`; returns its share of the loss, `scale` times which is differentiated."""
    inputs, targets, share = microbatch
    with phase("forward", str(number)):
        loss: Tensor = forward(inputs, targets) * share
    with phase("backward", str(number)):
        (loss if scale is None else loss * scale).backward()
    return loss.detach()


class StepsParameters:
    """The part of a Strategy that needs nothing but `model` and its optimizer."""

    def __init__(self, model: Model, config: Config) -> None:
        self.model, self.config = model, config
        self.optimizer = make_optimizer(model.parameters(), config)

    def update(self) -> None:
        """Clip by the norm of all gradients here, and step."""
        if self.config.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip)
        self.optimizer.step()

    def held(self, kind: str) -> Iterator[tuple[str, Tensor]]:
        """This rank's tensors, in the same order on every rank."""
        return named_tensors(self.model, self.optimizer, kind)

    def state_dict(self) -> dict[str, Any]:
        """All parameters and the optimizer's state of each, as they are trained on."""
        return dict(live_state(self.model.named_parameters(), self.optimizer))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing is left to do: the state was filled in place."""


class HoldsLayers(StepsParameters):
    """The same of a model whose layers run one by one on this rank, in whole or in part."""

    @property
    def layers(self) -> dict[int, nn.Module]:
        """All layers, by number."""
        return dict(enumerate(self.model.layers))


# Clipping by the global norm, where no rank holds all gradients.
#
# The norm of a model is that of all its gradients together, so each rank adds up the squares of what is its own, the
# sums are summed over the ranks, and every rank scales by the same factor. A gradient that several ranks hold counts
# on one of them alone: clipping each rank's part by its own norm would turn the gradient's direction (Pascanu et al.
# 2013, section 3.2).

CLIP_EPSILON = 1e-6  # torch.nn.utils.clip_grad_norm_ adds it to the norm, and what is ours has to equal it


@torch.no_grad()
def clip_gradients(
    once: Iterable[Tensor], every: Iterable[Tensor], max_norm: float, *groups: dist.ProcessGroup
) -> Tensor:
    """Scale `every` gradient of this rank in place, so that the global norm is at most `max_norm`; returns that norm.

    `once` are those that count on this rank: over all ranks each gradient of the model in exactly one of them. The
    `groups` of a mesh are its axes: what was summed along one is summed along the next.
    """
    every = list(every)
    squares = torch.zeros((), dtype=torch.float64, device=every[0].device if every else None)
    for gradient in once:
        squares += torch.linalg.vector_norm(gradient, dtype=torch.float64) ** 2
    for group in groups:
        dist.all_reduce(squares, group=group)
    norm = squares.sqrt()
    scale = min(1.0, max_norm / (norm.item() + CLIP_EPSILON))
    if scale < 1.0:
        for gradient in every:
            gradient.mul_(scale)
    return norm
