"""PyTorch's own on two of the three axes at a time: fully_shard on DTensors, and pipelining with fully_shard.

All three together, as in torchtitan, need a plan that knows stages; and over gloo neither DDP on DTensors works nor the
schedules without a bubble with fully_shard. predictions.py gives the reason for each.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from distlab.contract import Strategy
from distlab.lab.config import Config
from distlab.lab.workload.data import Microbatch
from distlab.lab.workload.model import Model
from distlab.lab.workload.optimizer import live_state, make_optimizer, named_tensors
from distlab.techniques.collectives.phases import phase
from distlab.techniques.collectives.point_to_point import Peers
from distlab.techniques.collectives.sharded_tensor import assembled, whole_piece
from distlab.techniques.mesh.grid import Mesh
from distlab.techniques.pipeline_parallel.strategy import Parts, joined, parts_of
from distlab.techniques.sharded.flat_parameter import FullySharded
from distlab.techniques.tensor_parallel.strategy import plan, tie


def dtensor_fsdp2(model: Model, mesh: Mesh, config: Config) -> Strategy:
    """parallelize_module over tp, then fully_shard over dp: a DeviceMesh of two axes."""
    # Imported here because they take a second per rank, and no other variant needs them.
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import parallelize_module

    device = "cuda" if config.device == "cuda" else "cpu"
    ranks = torch.arange(mesh.world.size()).view([group.size() for group in mesh.groups.values()]).squeeze()
    names = tuple(axis for axis, group in mesh.groups.items() if group.size() > 1)
    grid = DeviceMesh.from_group([mesh[axis] for axis in names], device, mesh=ranks, mesh_dim_names=names)
    parallelize_module(model, grid["tp"], plan(model))
    if config.tie:
        tie(model)
    blocks = model.layers[1:-1] if model.name == "gpt" else model.layers
    for module in (*blocks, model):
        fully_shard(module, mesh=grid["dp"])
    return ShardedDTensors(model, mesh, config)


class ShardedDTensors(FullySharded):
    """A model with DTensor weights on two axes, and a loss whose scores are a DTensor on the second."""

    def __init__(self, model: Model, mesh: Mesh, config: Config) -> None:
        super().__init__(model, mesh["dp"], config)
        self.mesh = mesh

    def backward(self, microbatches: list[Microbatch]) -> Tensor | None:  # type: ignore[override]
        from torch.distributed.tensor.parallel import loss_parallel

        with loss_parallel():
            loss = super().backward(microbatches)
        return loss if self.mesh.index("tp") == 0 else None

    def full(self, kind: str) -> Iterator[tuple[str, Tensor]]:
        """Yield tensors gathered over both axes, on rank 0 of all."""
        for label, tensor in named_tensors(self.model, self.optimizer, kind):
            dense = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            if self.mesh.world.rank() == 0:
                yield label, dense


def pipelining_fsdp2(model: Model, mesh: Mesh, config: Config) -> Strategy:
    """fully_shard over dp on the layers of each stage, and Schedule1F1B over pp."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    parts = parts_of(model, mesh["pp"])
    ((number, stage),) = parts.stages.items()
    replicas = DeviceMesh.from_group(mesh["dp"], "cuda" if config.device == "cuda" else "cpu")
    for module in (*stage.layers.values(), stage):
        fully_shard(module, mesh=replicas)
    return ShardedStages(parts, number, stage, model.loss, mesh, config)


class ShardedStages:
    """A Strategy with one stage under fully_shard, run by PyTorch's schedule.

    The schedule cuts the replica's batch into microbatches itself; fully_shard averages over the replicas, so the loss
    is multiplied by their number.
    """

    def __init__(
        self, parts: Parts, number: int, stage: nn.Module, loss: nn.Module, mesh: Mesh, config: Config
    ) -> None:
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B

        self.parts, self.stage, self.loss, self.mesh = parts, stage, loss, mesh
        self.ranks, self.first = Peers(mesh.world), number == 0
        self.last, self.share = number == mesh.size("pp") - 1, 1.0
        pipeline_stage = PipelineStage(
            stage, number, mesh.size("pp"), next(stage.parameters()).device, group=mesh["pp"]
        )
        self.schedule: Any = Schedule1F1B(
            pipeline_stage, config.num_microbatches, loss_fn=self._loss, scale_grads=False
        )
        self.optimizer = make_optimizer(stage.parameters(), config)

    def backward(self, microbatches: list[Microbatch]) -> Tensor | None:
        self.stage.zero_grad()
        inputs, targets, self.share = joined(microbatches)
        losses: list[Tensor] = []
        ends: dict[str, Any] = {"target": targets, "losses": losses} if self.last else {}
        with phase("forward", "0"):
            self.schedule.step(*([inputs] if self.first else []), **ends, return_outputs=False)
        return torch.stack([loss.detach() for loss in losses]).sum() / self.mesh.size("dp") if self.last else None

    def _loss(self, output: Tensor, targets: Tensor) -> Tensor:
        weighted: Tensor = self.loss(output, targets) * self.share * self.mesh.size("dp")
        return weighted

    def update(self) -> None:
        self.optimizer.step()

    def full(self, kind: str) -> Iterator[tuple[str, Tensor]]:
        """Yield tensors gathered over the replicas, then from the first of each stage."""
        tensors = [
            (label, whole_piece(tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor))
            for label, tensor in named_tensors(self.stage, self.optimizer, kind)
        ]
        yield from assembled(tensors if self.mesh.index("dp") == 0 else [], self.ranks)

    def state_dict(self) -> dict[str, Any]:
        return dict(live_state(self.stage.named_parameters(), self.optimizer))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing: the state was filled in place."""
