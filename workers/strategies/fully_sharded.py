"""The step around a model that PyTorch's `fully_shard` has taken over, whatever else was done to it before."""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from workers.config import Config
from workers.strategies.parameters import StepsParameters, forward_backward
from workers.strategies.sharded import as_many_as_all
from workers.workload.data import Microbatch
from workers.workload.model import Model


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
