"""PyTorch's own tensor parallelism: `parallelize_module` over DTensor, with the plan of its tutorial.

The embedding by rows and the loss over sharded scores too (`loss_parallel`), so that it does what `megatron` does. One
difference is the tutorial's: q, k and v each take an input of their own, whose gradients are summed three times, not once.
"""

from contextlib import nullcontext
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from workers.config import Config
from workers.lab import Strategy
from workers.parallel.cut import Cut
from workers.strategies.tensor import Shard
from workers.workload.data import Microbatch
from workers.workload.model import Model


def dtensor(model: Model, group: dist.ProcessGroup, config: Config) -> Strategy:
    """PyTorch's parallelize_module, with ColwiseParallel and RowwiseParallel."""
    # Not at the top: it takes a rank 0.7 s, and no other variant needs it.
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel import parallelize_module

    mesh = DeviceMesh.from_group(group, "cuda" if config.device == "cuda" else "cpu")
    parallelize_module(model, mesh, plan(model))
    if config.tie:
        model.layers[-1].get_submodule("project").register_parameter(
            "weight", model.get_parameter("layers.0.token.weight")
        )
    return ShardOfDTensors(model, group, config, cuts_of(model, group.size()))


class ShardOfDTensors(Shard):
    """A Shard whose scores are a DTensor, too, and whose loss takes them so."""

    def backward(self, microbatches: list[Microbatch]) -> Tensor | None:
        """As a Shard's, with both passes inside of `loss_parallel`."""
        from torch.distributed.tensor import DTensor
        from torch.distributed.tensor.parallel import loss_parallel

        with loss_parallel() if self.model.name == "gpt" else nullcontext():
            share = super().backward(microbatches)
        for parameter in map(self.model.get_parameter, self.cuts):
            if isinstance(parameter, DTensor) and isinstance(parameter.grad, DTensor):  # the embedding's comes whole
                parameter.grad = parameter.grad.redistribute(placements=parameter.placements)
        return share


def plan(model: nn.Module) -> dict[str, Any]:
    """How each linear layer and embedding is parallelised, by its name."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    styles = {
        "token": RowwiseParallel(input_layouts=Replicate()),
        "q": ColwiseParallel(), "k": ColwiseParallel(), "v": ColwiseParallel(), "o": RowwiseParallel(),
        "up": ColwiseParallel(), "down": RowwiseParallel(),
        "project": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }  # fmt: skip
    names = [name for name, _ in model.named_modules()]
    return {name: styles[name.rpartition(".")[2]] for name in names if name.rpartition(".")[2] in styles}


def cuts_of(model: nn.Module, num_ranks: int) -> dict[str, Cut]:
    """The cut of each parameter that DTensor shards; it shards evenly, or `cannot` leaves it out."""
    cuts = {}
    for name, parameter in model.named_parameters():
        placement = getattr(parameter, "placements", [None])[0]
        if placement is not None and placement.is_shard():
            cuts[name] = Cut(placement.dim, (parameter.shape[placement.dim] // num_ranks,) * num_ranks)
    return cuts
