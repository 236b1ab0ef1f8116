"""PyTorch's own mixed precision: torch.autocast computes in 16 bits what it knows to be safe, torch.amp.GradScaler
scales the loss, and DistributedDataParallel sums the gradients, which stay float32 as the weights do."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from distlab.contract import Strategy
from distlab.lab.config import Config
from distlab.lab.workload.data import Microbatch
from distlab.lab.workload.model import Model
from distlab.techniques.data_parallel.strategy import Replica, Wrapped, begin_alike
from distlab.techniques.mesh.grid import Mesh


class Autocast(Replica):
    """float32 weights, passes in fp16 where autocast chooses it, and a loss that GradScaler scales.

    In float64 autocast leaves everything as it is, so that the proof compares it as any other variant.
    """

    def __init__(self, model: Model, group: dist.ProcessGroup, config: Config) -> None:
        wrapped = DistributedDataParallel(model, process_group=group, bucket_cap_mb=config.bucket_mib, init_sync=False)
        super().__init__(model, config, Wrapped(wrapped), forward=wrapped)
        self.num_ranks = group.size()
        parameters, rate = list(model.parameters()), config.learning_rate
        adam = config.optimizer == "adamw"
        self.stepped = torch.optim.AdamW(parameters, rate) if adam else torch.optim.SGD(parameters, rate)
        self.optimizer = self.stepped
        self.scaler = torch.amp.GradScaler(config.device)
        self.device_type = config.device

    def backward(self, microbatches: list[Microbatch]) -> Tensor:
        """DDP gives the mean over the ranks, and ours is the sum of their shares, so it is multiplied in the end."""
        self.scale = float(self.scaler.scale(torch.ones((), device=self.device_type)))
        with torch.autocast(self.device_type, torch.float16):
            share = super().backward(microbatches)
        self.scaler.unscale_(self.stepped)
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(self.num_ranks)
        return share

    def update(self) -> None:
        """A step that GradScaler skips where a gradient is inf or NaN."""
        if self.config.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip)
        self.scaler.step(self.stepped)
        self.scaler.update()


def autocast(model: Model, mesh: Mesh, config: Config) -> Strategy:
    """PyTorch's own: torch.autocast in fp16 with GradScaler, around float32 weights, below DDP."""
    begin_alike(model, mesh.group, config)
    return Autocast(model, mesh.group, config)
