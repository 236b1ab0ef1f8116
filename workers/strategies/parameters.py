"""What strategies share whose optimizer steps a model's own parameters: the passes, the update, and the state by name.

A rank may hold all of the model or a part of it; what it does hold, it holds under the dense model's names, so that a
proof or a checkpoint reads it as it stands.
"""

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from workers.config import Config
from workers.parallel.phases import phase
from workers.workload.data import Microbatch
from workers.workload.model import Model
from workers.workload.optimizer import live_state, make_optimizer, named_tensors


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
