"""What every pipelined variant shares: its part of the model, gradients in place, an optimizer, and the way to rank 0.

A variant differs in one thing only: the order of its work (`Engine`). Everything else is the same for all: this rank's
stages, tied gradients summed over the ranks that hold them, one global norm to clip by.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from workers.config import Config
from workers.parallel.boundaries import sendable
from workers.parallel.clip import clip_gradients
from workers.parallel.peers import Peers
from workers.parallel.stages import Parts, cut, divide, sum_shared
from workers.strategies.engines import Engine
from workers.workload.data import Microbatch
from workers.workload.model import Model
from workers.workload.optimizer import live_state, make_optimizer, tensors_of


class Pipelined:
    """A Strategy: `parts` are this rank's stages, `engine` what sends microbatches through them."""

    def __init__(self, parts: Parts, engine: Engine, group: dist.ProcessGroup, config: Config) -> None:
        self.parts, self.engine, self.group, self.config = parts, engine, group, config
        self.peers = Peers(group)
        self.optimizer = make_optimizer(parts.parameters.values(), config)

    def backward(self, microbatches: list[Microbatch]) -> Tensor | None:
        """Every rank gets the whole batch: the first stage reads its inputs, the last one its targets."""
        for parameter in self.parts.parameters.values():
            parameter.grad = None
        loss = self.engine.step(microbatches)
        sum_shared(self.parts, self.peers)
        return loss

    @property
    def layers(self) -> dict[int, nn.Module]:
        """This rank's layers, by number in the model."""
        return self.parts.layers

    def update(self) -> None:
        """Clip by the norm of all ranks' gradients, in which a tied one counts on the first of its ranks, and step."""
        if self.config.clip is not None:
            gradients = {name: p.grad for name, p in self.parts.parameters.items() if p.grad is not None}
            once = [gradient for name, gradient in gradients.items() if self._owner(name) == self.peers.rank]
            clip_gradients(once, gradients.values(), self.config.clip, self.group)
        self.optimizer.step()

    def full(self, kind: str) -> Iterator[tuple[str, Tensor]]:
        """Every rank sends what it holds to rank 0, which alone yields, the model's tensors in the dense order."""
        for name in self.parts.holders:
            for prefix, like in self._templates(kind).items():
                tensor = self._to_first(kind, name, prefix, like)
                if tensor is not None:
                    yield f"{prefix}.{name}" if prefix else name, tensor

    def _to_first(self, kind: str, name: str, prefix: str, like: Tensor) -> Tensor | None:
        """One tensor of the parameter `name`, on rank 0."""
        owner, tag = self._owner(name), self.peers.new_tag()
        if self.peers.rank not in (0, owner):
            return None
        if owner == self.peers.rank:
            tensor = tensors_of(kind, self.optimizer, self.parts.parameters[name])[prefix]
            if owner == 0:
                return tensor
            self.peers.post(tag, sends=[(0, sendable(tensor, self.peers))])[1][0].wait()
            return None
        shape = self.parts.shapes[name] if like.dim() else like.shape  # AdamW counts its steps in a scalar
        buffer = like.new_empty(shape, device=None if self.peers.batched else "cpu")
        self.peers.post(tag, receives=[(owner, buffer)])[0][0].wait()
        return buffer.to(like.device)

    def _templates(self, kind: str) -> dict[str, Tensor]:
        """The tensors of one `kind` that this rank's first parameter has: every parameter has the same."""
        return tensors_of(kind, self.optimizer, next(iter(self.parts.parameters.values())))

    def _owner(self, name: str) -> int:
        return self.parts.holders[name][0]

    def alike(self, kind: str) -> Iterator[tuple[str, Tensor]]:
        """The layers of this rank: tied weights are on another rank too."""
        for name, parameter in self.parts.parameters.items():
            for tensor in tensors_of(kind, self.optimizer, parameter).values():
                yield name, tensor

    def state_dict(self) -> dict[str, Any]:
        """The layers of this rank, under their dense names."""
        return dict(live_state(self.parts.parameters.items(), self.optimizer))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing is left to do: the state was filled in place."""


def runs_of(name: str, num_layers: int, num_stages: int) -> list[range]:
    """The layers of each stage: gpt's embedding goes with the first block and its head with the last."""
    ends = 1 if name == "gpt" else 0
    return divide(num_layers, num_stages, first=ends, last=ends)


def parts_of(model: Model, group: dist.ProcessGroup, owners: Sequence[int] = ()) -> Parts:
    """This rank's stages, of which stage s is on rank `owners[s]`; by default every rank has one."""
    owners = owners or range(group.size())
    runs = runs_of(model.name, len(model.layers), len(owners))
    return cut(model, list(model.layers), runs, group.rank(), owners)
