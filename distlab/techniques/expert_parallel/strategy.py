"""The step of every expert-parallel variant: each rank holds some experts, everything else whole, and an optimizer.

Gradients of what all ranks hold are summed over all ranks, in buckets after the backward pass. An expert's gradient is
complete on its rank: every token that it computed sent its gradient there, whichever rank the token belongs to. It is
summed only over the copies of that expert, where there are any.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distlab.lab.config import Config
from distlab.lab.workload.data import Microbatch
from distlab.lab.workload.experts import Mixture, MixtureModel
from distlab.lab.workload.optimizer import PartitionedStrategy, forward_backward
from distlab.techniques.collectives.sharded_tensor import LocalShard, whole_piece
from distlab.techniques.data_parallel.buckets import GradientBuckets
from distlab.techniques.expert_parallel.layer import MixtureOfExperts, Placement, RowDispatch


class ExpertParallel(PartitionedStrategy):
    """A Strategy over `model`, whose mixtures are distributed by `placement` over the ranks of `world`.

    `copies` are the ranks that hold the same experts as this one, if there are several.
    """

    repeats_after = 0  # each batch is routed anew

    def __init__(
        self, model: MixtureModel, placement: Placement, world: dist.ProcessGroup, config: Config,
        copies: dist.ProcessGroup | None = None,
    ) -> None:  # fmt: skip
        super().__init__(dict(model.named_parameters()), dict(enumerate(model.layers)), world, config)
        self.model, self.placement, self.world = model, placement, world
        self.parts = {
            f"{name}.experts.{key}": parameter
            for name, mixture in model.mixtures.items()
            for key, parameter in mixture.get_submodule("experts").named_parameters()
        }
        replicated = [parameter for name, parameter in self.named.items() if self.is_summed(name)]
        bucket_bytes = config.bucket_mib * 2**20
        self.sums = [GradientBuckets(replicated, world, bucket_bytes)]
        if copies is not None:
            own_experts = [parameter for parameter in self.parts.values() if parameter.numel()]
            self.sums.append(GradientBuckets(own_experts, copies, bucket_bytes))

    def backward(self, microbatches: list[Microbatch]) -> Tensor:
        """Run forward and backward, of equally many microbatches on all ranks: tokens travel in both."""
        self.model.zero_grad()
        losses = [forward_backward(self.model, microbatch, number) for number, microbatch in enumerate(microbatches)]
        for sums in self.sums:
            sums.finish()
        for parameter in self.parts.values():
            if parameter.grad is None:  # a rank without experts; its optimizer steps the empty parameter, too
                parameter.grad = torch.zeros_like(parameter)
        return torch.stack(losses).sum()

    def is_summed(self, name: str) -> bool:
        """Whether the parameter's gradient is summed over all ranks, each of which has computed a part of it."""
        return name not in self.parts

    def counts(self, name: str, tensor: Tensor) -> bool:
        """Count experts on the ranks of the first copy; everything else, and AdamW's number of steps, on rank 0."""
        rank = self.world.rank()
        return rank < self.placement.ranks_of_a_copy if name in self.parts and tensor.dim() else rank == 0

    def piece(self, name: str, tensor: Tensor) -> LocalShard:
        """Return this rank's experts with their place in the dense tensor."""
        if name in self.parts and tensor.dim():
            return self.placement.piece(name.rpartition(".")[2], tensor, self.world.rank())
        return whole_piece(tensor)

    def is_replicated(self, name: str) -> bool:
        """Whether all ranks hold the same: true of everything except experts, whose copies are on some ranks only."""
        return self.is_summed(name)


def distribute(
    model: MixtureModel, placement: Placement, world: dist.ProcessGroup, dispatch: RowDispatch,
    layer: Callable[..., nn.Module] = MixtureOfExperts,
) -> None:  # fmt: skip
    """Replace each mixture of a dense `model` by this rank's part of it, in place; parameters keep their names."""
    for name, mixture in model.mixtures.items():
        assert isinstance(mixture, Mixture)
        for key, dense in list(mixture.experts.named_parameters()):
            part = dense.detach()[placement.box(key, world.rank())].clone(memory_format=torch.contiguous_format)
            setattr(mixture.experts, key, nn.Parameter(part))
        model.set_submodule(name, layer(mixture.router, mixture.experts, mixture.mixing, world, dispatch))
