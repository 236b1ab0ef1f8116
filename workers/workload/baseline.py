"""One process, the whole batch, nothing clever: what every strategy has to equal."""

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor, nn

from workers.config import Config
from workers.workload.data import Batches
from workers.workload.model import Model
from workers.workload.optimizer import make_optimizer, named_state


class Snapshot(NamedTuple):
    """What is left after a step: copies, on the model's device, under dense names."""

    loss: float  # mean over the terms of the global batch, before the update
    gradients: dict[str, Tensor]  # as the optimizer saw them: after clipping
    weights: dict[str, Tensor]  # after the update
    optimizer: dict[str, Tensor]


def train(model: Model, batches: Batches, config: Config, steps: int) -> Iterator[Snapshot]:
    """Train `model` in place for `steps` steps; yields a Snapshot after each."""
    model.recompute = False  # or the proof of LAB_RECOMPUTE would hold a mistake against itself
    optimizer = make_optimizer(model.parameters(), config)
    for step in range(steps):
        inputs, targets, share = batches.full(step)
        optimizer.zero_grad()
        loss = model(inputs, targets) * share
        loss.backward()
        if config.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), config.clip)
        optimizer.step()
        yield Snapshot(
            loss=loss.item(),
            gradients={name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None},
            weights={name: p.detach().clone() for name, p in model.named_parameters()},
            optimizer={name: state.clone() for name, state in named_state(model, optimizer)},
        )
