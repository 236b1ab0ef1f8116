"""What the hand-written variants share: a Strategy over sharded parameters (flat_parameter.py and zero.py beside it).

Every rank works on its own part of the batch, as in dp. What differs is what it keeps between the steps: the optimizer
here steps flat shards, one a layer, and knows no other parameters.
"""

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distlab.config import Config
from distlab.sharded.flat_parameter import FlatUnits
from distlab.workload.data import Microbatch
from distlab.workload.model import Model
from distlab.workload.optimizer import make_optimizer, prime, tensors_of
from distlab.workload.strategy import StepsParameters, clip_gradients, forward_backward

Clip: TypeAlias = Callable[[list[Tensor], float, dist.ProcessGroup], None]


def clip_by_all(gradients: list[Tensor], bound: float, group: dist.ProcessGroup) -> None:
    """Clip this rank's shards by the norm of all ranks' shards together."""
    clip_gradients(gradients, gradients, bound, group)


class Sharded:
    """A Strategy: `model` computes with weights of which this rank owns a part, which `zero` keeps and gathers."""

    def __init__(
        self, model: Model, zero: FlatUnits, group: dist.ProcessGroup, config: Config, clip: Clip = clip_by_all
    ) -> None:
        self.model, self.zero, self.group, self.config, self.clip = model, zero, group, config, clip
        self.optimizer = make_optimizer(self.zero.masters, config)

    def backward(self, microbatches: list[Microbatch]) -> Tensor:
        """Forward and backward of this rank's microbatches."""
        shares: list[Tensor] = []
        self.zero.begin()
        for number, microbatch in enumerate(as_many_as_all(microbatches, self.config)):
            with self.zero.microbatch(last=number == self.config.num_microbatches - 1):
                shares.append(forward_backward(self.model, microbatch, number))
        self.zero.finish()
        return torch.stack(shares).sum()

    @property
    def layers(self) -> dict[int, nn.Module]:
        """All layers, by number."""
        return dict(enumerate(self.model.layers))

    def update(self) -> None:
        """Clip by the norm of all shards together, step this rank's, and give the others what is new."""
        if self.config.clip is not None:
            self.clip(self.zero.gradients, self.config.clip, self.group)
        self.zero.deliver()
        self.optimizer.step()
        self.zero.publish()

    def full(self, kind: str) -> Iterator[tuple[str, Tensor]]:
        """Dense tensors on rank 0, gathered a unit at a time; nothing elsewhere."""
        for unit in self.zero.units:
            for key, shard in tensors_of(kind, self.optimizer, unit.master, unit.shard).items():
                tensors = self.zero.dense(unit, shard) if shard.dim() else [shard] * len(unit.named)
                for name, tensor in zip(unit.named, tensors, strict=True):
                    if self.group.rank() == 0:
                        yield f"{key}.{name}" if key else name, tensor

    def alike(self, kind: str) -> Iterator[tuple[str, Tensor]]:
        """Weights, where every rank keeps all of them; of gradients each has a part of its own."""
        if kind == "weights" and self.zero.keeps_whole:
            for unit in self.zero.units:
                yield from zip(unit.named, unit.views(unit.whole), strict=True)

    def state_dict(self) -> dict[str, Any]:
        """This rank's pieces of the dense tensors."""
        prime(self.optimizer)
        state: dict[str, Any] = {}
        for unit in self.zero.units:
            kept = {"": unit.master.detach()} | tensors_of("optimizer", self.optimizer, unit.master)
            for label, shard in kept.items():
                prefix = f"optimizer.{label}" if label else "weights"
                held = unit.pieces(shard) if shard.dim() else ((name, shard) for name in unit.named)
                state |= {f"{prefix}.{name}": piece for name, piece in held}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: ARG002  it was filled in place
        """The shards are loaded: every rank gets the others'."""
        self.zero.publish()


def as_many_as_all(microbatches: list[Microbatch], config: Config) -> list[Microbatch]:
    """A rank with fewer samples than microbatches works on its last ones again for nothing: the ranks' calls must
    meet."""
    idle = config.num_microbatches - len(microbatches)
    return microbatches + [microbatches[-1]._replace(share=0.0)] * idle


# The step around a model that PyTorch's `fully_shard` has taken over, whatever else was done to it before.


class FullySharded(StepsParameters):
    """A Strategy around a model that fully_shard has taken over; torch's clip_grad_norm_ knows DTensors: its norm is
    that of all shards."""

    def __init__(self, model: Model, group: dist.ProcessGroup, config: Config) -> None:
        super().__init__(model, config)
        self.group = group

    def backward(self, microbatches: list[Microbatch]) -> Tensor:
        """It averages over the ranks, so the loss that it differentiates is that many times ours."""
        self.model.zero_grad()
        shares = [
            forward_backward(self.model, microbatch, number, self.group.size())
            for number, microbatch in enumerate(as_many_as_all(microbatches, self.config))
        ]
        return torch.stack(shares).sum()

    def full(self, kind: str) -> Iterator[tuple[str, Tensor]]:
        """Dense tensors on rank 0, gathered one at a time; nothing elsewhere."""
        for label, tensor in self.held(kind):
            whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            if self.group.rank() == 0:
                yield label, whole
