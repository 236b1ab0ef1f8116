"""PyTorch's own tensor parallelism: `parallelize_module` over DTensor, with the plan of its tutorial.

The embedding by rows and the loss over sharded scores too (`loss_parallel`), so that it does what `megatron` does.
One difference is the tutorial's: q, k and v each take an input of their own, whose gradients are summed three times,
not once.
"""

from contextlib import nullcontext
from typing import Any

from torch import Tensor, nn

from experiments.tp.cuts import styles
from experiments.tp.plans import cuts_of
from workers.config import Config
from workers.contract import Strategy
from workers.parallel.mesh import Mesh
from workers.parallel.slices import Slice
from workers.strategies.tensor import TensorParallel
from workers.workload.data import Microbatch
from workers.workload.model import Model
from workers.workload.own import is_own


def dtensor(model: Model, mesh: Mesh, config: Config) -> Strategy:
    """PyTorch's parallelize_module, with ColwiseParallel and RowwiseParallel."""
    # Not at the top: it takes a rank 0.7 s, and no other variant needs it.
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel import parallelize_module

    devices = DeviceMesh.from_group(mesh.group, "cuda" if config.device == "cuda" else "cpu")
    own = is_own(config.model)
    parallelize_module(model, devices, styles(cuts_of(config, mesh.group.size())) if own else plan(model))
    if config.tie and not own:
        model.layers[-1].get_submodule("project").register_parameter(
            "weight", model.get_parameter("layers.0.token.weight")
        )
    return OfDTensors(model, mesh.group, config, slices_of(model, mesh.group.size()))


class OfDTensors(TensorParallel):
    """One whose weights are DTensors, whose scores are one, too, and whose loss takes them so."""

    def backward(self, microbatches: list[Microbatch]) -> Tensor | None:
        """The same, with both passes inside of `loss_parallel`."""
        from torch.distributed.tensor import DTensor
        from torch.distributed.tensor.parallel import loss_parallel

        with loss_parallel() if self.model.name == "gpt" else nullcontext():
            share = super().backward(microbatches)
        for parameter in map(self.model.get_parameter, self.slices):
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


def slices_of(model: nn.Module, num_ranks: int) -> dict[str, Slice]:
    """How each parameter is sliced that DTensor shards; it shards evenly, or `cannot` leaves it out."""
    slices = {}
    for name, parameter in model.named_parameters():
        placement = getattr(parameter, "placements", [None])[0]
        if placement is not None and placement.is_shard():
            slices[name] = Slice(placement.dim, (parameter.shape[placement.dim] // num_ranks,) * num_ranks)
    return slices
