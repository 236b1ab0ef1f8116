"""What every expert-parallel variant shares: its part of the experts, all else whole, and an optimizer on each rank.

What all ranks hold is summed over all of them, in buckets while the backward pass runs. An expert's gradient is
complete where the expert is: every token that it computed sent its gradient there, whichever rank it belongs to. It is
summed over the copies of that expert, where there are any, and over nobody else.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distlab.collectives.point_to_point import Peers
from distlab.config import Config
from distlab.data_parallel.buckets import GradientBuckets
from distlab.expert_parallel.layer import Carries, MixtureOfExperts, Placement, Rules
from distlab.workload.data import Microbatch
from distlab.workload.experts import BIAS_RATE, Mixture, MixtureModel
from distlab.workload.optimizer import tensors_of
from distlab.workload.strategy import HoldsLayers, clip_gradients, forward_backward


def distribute(
    model: MixtureModel, placement: Placement, world: dist.ProcessGroup, carries: Carries,
    layer: type[MixtureOfExperts] = MixtureOfExperts,
) -> None:  # fmt: skip
    """Replace each mixture of a dense `model` by this rank's part of it, in place; parameters keep their names."""
    for name, mixture in model.mixtures.items():
        assert isinstance(mixture, Mixture)
        for key, dense in list(mixture.experts.named_parameters()):
            part = dense.detach()[placement.box(key, world.rank())].clone(memory_format=torch.contiguous_format)
            setattr(mixture.experts, key, nn.Parameter(part))
        mixing = mixture.mixing
        rules = Rules(mixing.top_k, mixing.capacity_factor, mixing.balance, mixing.z, BIAS_RATE)
        model.set_submodule(name, layer(mixture.router, mixture.experts, rules, world, carries))


class ExpertParallel(HoldsLayers):
    """A Strategy over `model`, whose mixtures are distributed by `placement` over the ranks of `world`.

    `copies` are the ranks that hold the same experts as this one, where they are more than one.
    """

    repeats_after = 0  # each batch is routed anew

    def __init__(
        self, model: MixtureModel, placement: Placement, world: dist.ProcessGroup, config: Config,
        copies: dist.ProcessGroup | None = None,
    ) -> None:  # fmt: skip
        super().__init__(model, config)
        self.model: MixtureModel = model
        self.placement, self.world = placement, world
        self.peers = Peers(world)
        self.parts = {
            f"{name}.experts.{key}": parameter
            for name, mixture in model.mixtures.items()
            for key, parameter in mixture.get_submodule("experts").named_parameters()
        }
        whole = [parameter for name, parameter in model.named_parameters() if self.is_summed(name)]
        bucket_bytes = config.bucket_mib * 2**20
        self.sums = [GradientBuckets(whole, world, bucket_bytes)]
        if copies is not None:
            held = [parameter for parameter in self.parts.values() if parameter.numel()]
            self.sums.append(GradientBuckets(held, copies, bucket_bytes))

    def backward(self, microbatches: list[Microbatch]) -> Tensor:
        """Forward and backward of this rank's part of each microbatch, of which all ranks have as many; tokens travel
        inside of both."""
        self.model.zero_grad()
        losses = [
            self.routed(number, microbatch, last=number == len(microbatches) - 1)
            for number, microbatch in enumerate(microbatches)
        ]
        for sums in self.sums:
            sums.finish()
        for parameter in self.parts.values():
            if parameter.grad is None:  # of no experts; an optimizer steps it like the others
                parameter.grad = torch.zeros_like(parameter)
        return torch.stack(losses).sum()

    def routed(self, number: int, microbatch: Microbatch, *, last: bool) -> Tensor:
        """One microbatch there and back; the last one's gradients are summed over the ranks as they come."""
        with ExitStack() as armed:
            for sums in self.sums:
                armed.enter_context(sums.accumulate(last=last))
            return forward_backward(self.model, microbatch, number)

    def is_summed(self, name: str) -> bool:
        """Whether a parameter's gradient is summed over all ranks: each has found a part of it."""
        return name not in self.parts

    def update(self) -> None:
        """Clip by the norm of all gradients, each counted on the first rank that holds it, and take a step."""
        if self.config.clip is not None:
            named = {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}
            once = [gradient for name, gradient in named.items() if self.counts(name)]
            clip_gradients(once, named.values(), self.config.clip, self.world)
        self.optimizer.step()

    def counts(self, name: str) -> bool:
        """Whether this rank is the first that holds its part of a parameter."""
        rank = self.world.rank()
        return rank < self.placement.ranks_of_a_copy if name in self.parts else rank == 0

    def full(self, kind: str) -> Iterator[tuple[str, Tensor]]:
        """Dense tensors on rank 0, the parts of the first copy joined; nothing elsewhere."""
        for name, parameter in self.model.named_parameters():
            tag = self.peers.new_tag()
            for prefix, tensor in tensors_of(kind, self.optimizer, parameter).items():
                joined: Tensor | None = tensor
                if name in self.parts and tensor.dim():  # AdamW's number of steps is one number for all parts
                    joined = self.joined(name.rpartition(".")[2], tensor, tag)
                if joined is not None and self.world.rank() == 0:
                    yield f"{prefix}.{name}" if prefix else name, joined

    def joined(self, key: str, part: Tensor, tag: int) -> Tensor | None:
        """The dense tensor of all parts, on rank 0."""
        if self.world.rank() > 0:
            sends = [(0, part.contiguous())] if self.world.rank() < self.placement.ranks_of_a_copy else []
            for message in self.peers.post(tag, sends=sends)[1]:
                message.wait()
            return None
        dense = part.new_empty(self.placement.shape(key, part))
        boxes = [self.placement.box(key, rank) for rank in range(self.placement.ranks_of_a_copy)]
        buffers = [part, *(torch.empty_like(dense[box]).contiguous() for box in boxes[1:])]
        for message in self.peers.post(tag, receives=list(enumerate(buffers))[1:])[0]:
            message.wait()
        for box, buffer in zip(boxes, buffers, strict=True):
            dense[box] = buffer
        return dense

    def alike(self, kind: str) -> Iterator[tuple[str, Tensor]]:
        """All but the experts, whose copies stand along a column of the grid alone."""
        for name, parameter in self.model.named_parameters():
            if self.is_summed(name):
                for tensor in tensors_of(kind, self.optimizer, parameter).values():
                    yield name, tensor

    def state_dict(self) -> dict[str, Any]:
        """Of experts this rank's piece."""
        state = super().state_dict()
        for label, tensor in state.items():
            name = next((name for name in self.parts if label.endswith(f".{name}")), None)
            if name is not None and tensor.dim():
                state[label] = self.placement.piece(name.rpartition(".")[2], tensor, self.world.rank())
        return state
