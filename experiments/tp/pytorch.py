"""PyTorch's own tensor parallelism: `parallelize_module` over DTensor, with the plan of its tutorial.

The embedding by rows and the loss over sharded scores too (`loss_parallel`), so that it does what `megatron` does.
One difference is the tutorial's: q, k and v each take an input of their own, whose gradients are summed three times,
not once.
"""

from contextlib import nullcontext

from torch import Tensor, nn

from distlab.config import Config
from distlab.contract import Strategy
from distlab.mesh.grid import Mesh
from distlab.tensor_parallel.layers import Slice
from distlab.tensor_parallel.strategy import TensorParallel, plan, tie
from distlab.workload.data import Microbatch
from distlab.workload.model import Model
from distlab.workload.user_model import is_own

from .user_plans import cuts_of, styles


def dtensor(model: Model, mesh: Mesh, config: Config) -> Strategy:
    """PyTorch's parallelize_module, with ColwiseParallel and RowwiseParallel."""
    # Not at the top: it takes a rank 0.7 s, and no other variant needs it.
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel import parallelize_module

    devices = DeviceMesh.from_group(mesh.group, "cuda" if config.device == "cuda" else "cpu")
    own = is_own(config.model)
    parallelize_module(model, devices, styles(cuts_of(config, mesh.group.size())) if own else plan(model))
    if config.tie and not own:
        tie(model)
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


def slices_of(model: nn.Module, num_ranks: int) -> dict[str, Slice]:
    """How each parameter is sliced that DTensor shards; it shards evenly, or `cannot` leaves it out."""
    slices = {}
    for name, parameter in model.named_parameters():
        placement = getattr(parameter, "placements", [None])[0]
        if placement is not None and placement.is_shard():
            slices[name] = Slice(placement.dim, (parameter.shape[placement.dim] // num_ranks,) * num_ranks)
    return slices
