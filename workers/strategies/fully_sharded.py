"""The step around a model that PyTorch's `fully_shard` has taken over, whatever else was done to it before."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from workers.config import Config
from workers.parallel.phases import phase
from workers.strategies.sharded import as_many_as_all
from workers.workload.data import Microbatch
from workers.workload.model import Model
from workers.workload.optimizer import live_state, make_optimizer, named_tensors


class FullySharded:
    """A Strategy around a model that fully_shard has taken over."""

    def __init__(self, model: Model, group: dist.ProcessGroup, config: Config) -> None:
        self.model, self.group, self.config = model, group, config
        self.optimizer = make_optimizer(model.parameters(), config)

    def backward(self, microbatches: list[Microbatch]) -> Tensor:
        """It averages over the ranks, so the loss that it differentiates is that many times ours."""
        shares: list[Tensor] = []
        self.model.zero_grad()
        for inputs, targets, share in as_many_as_all(microbatches, self.config):
            with phase("forward", str(len(shares))):
                loss = self.model(inputs, targets) * share
            with phase("backward", str(len(shares))):
                (loss * self.group.size()).backward()
            shares.append(loss.detach())
        return torch.stack(shares).sum()

    def update(self) -> None:
        """torch's clip_grad_norm_ knows DTensors: its norm is that of all shards."""
        if self.config.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip)
        self.optimizer.step()

    def full(self, kind: str) -> Iterator[tuple[str, Tensor]]:
        """Dense tensors on rank 0, gathered one at a time; nothing elsewhere."""
        for label, tensor in named_tensors(self.model, self.optimizer, kind):
            whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            if self.group.rank() == 0:
                yield label, whole

    def state_dict(self) -> dict[str, Any]:
        return dict(live_state(self.model.named_parameters(), self.optimizer))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing is left to do: the state was filled in place."""
