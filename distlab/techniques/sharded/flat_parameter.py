"""The parameters of a layer as one flat vector, of which every rank owns a part; and the training step over such parts.

Sharding a layer tensor by tensor would cost a call per tensor, and some tensors have fewer rows than there are ranks.
Laid end to end the tensors are one vector that any number of ranks can share (Zhao et al. 2023, "PyTorch FSDP", section
3.2.1): one call gathers the layer, and a rank's part may begin in the middle of one matrix and end in the middle of the
next.

    whole   [N·c]  all parameters of the unit are views of it, c = ceil(P/N); the last N·c - P numbers are padding, so
                   that all messages have one size
    local   [c]    this rank's chunk of it
    shard   [<=c]  the chunk without padding, uneven over the ranks: the last may own nothing; its `grad` is the summed
                   gradient
    master  [<=c]  what the optimizer steps: the shard, or a copy of it in float32 where weights have 16 bits
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distlab.lab.config import Config
from distlab.lab.workload.data import Microbatch
from distlab.lab.workload.model import Model
from distlab.lab.workload.optimizer import (
    StepsParameters,
    clip_gradients,
    forward_backward,
    make_optimizer,
    prime,
    tensors_of,
)
from distlab.techniques.collectives.by_hand import Collective
from distlab.techniques.collectives.sharded_tensor import LocalShard, flat_piece


class Sharded:
    """A Strategy: every rank trains the whole model on its part of the batch; `zero` keeps and gathers the weights.

    As in dp; but a rank's optimizer knows only its own flat shards, one per unit.
    """

    def __init__(self, model: Model, zero: "FlatUnits", group: dist.ProcessGroup, config: Config) -> None:
        self.model, self.zero, self.group, self.config = model, zero, group, config
        self.optimizer = make_optimizer(self.zero.masters, config)

    def backward(self, microbatches: list[Microbatch]) -> Tensor:
        losses: list[Tensor] = []
        self.zero.begin()
        for number, microbatch in enumerate(pad_microbatches(microbatches, self.config)):
            with self.zero.microbatch(last=number == self.config.num_microbatches - 1):
                losses.append(forward_backward(self.model, microbatch, number))
        self.zero.finish()
        return torch.stack(losses).sum()

    @property
    def layers(self) -> dict[int, nn.Module]:
        return dict(enumerate(self.model.layers))

    def update(self) -> None:
        """Clip by the norm of all ranks' shards together, step this rank's, and publish the new weights."""
        if self.config.clip is not None:
            clip_gradients(self.zero.gradients, self.zero.gradients, self.config.clip, self.group)
        self.zero.deliver()
        self.optimizer.step()
        self.zero.publish()

    def full(self, kind: str) -> Iterator[tuple[str, Tensor]]:
        """Yield dense tensors on rank 0, gathered unit by unit; nothing on other ranks."""
        for unit in self.zero.units:
            for key, shard in tensors_of(kind, self.optimizer, unit.master, unit.shard).items():
                tensors = self.zero.dense(unit, shard) if shard.dim() else [shard] * len(unit.named)
                for name, tensor in zip(unit.named, tensors, strict=True):
                    if self.group.rank() == 0:
                        yield f"{key}.{name}" if key else name, tensor

    def alike(self, kind: str) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights where every rank keeps all of them; of gradients each rank has a part."""
        if kind == "weights" and self.zero.keeps_whole:
            for unit in self.zero.units:
                yield from zip(unit.named, unit.views(unit.whole), strict=True)

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's pieces of the dense tensors."""
        prime(self.optimizer)
        state: dict[str, Any] = {}
        for unit in self.zero.units:
            tensors = {"": unit.master.detach()} | tensors_of("optimizer", self.optimizer, unit.master)
            for label, shard in tensors.items():
                prefix = f"optimizer.{label}" if label else "weights"
                pieces = unit.pieces(shard) if shard.dim() else ((name, shard) for name in unit.named)
                state |= {f"{prefix}.{name}": piece for name, piece in pieces}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: ARG002  it was filled in place
        """Publish the loaded shards."""
        self.zero.publish()


def pad_microbatches(microbatches: list[Microbatch], config: Config) -> list[Microbatch]:
    """Repeat a rank's last microbatch, with weight 0, until it has as many as the others: all make the same calls."""
    idle = config.num_microbatches - len(microbatches)
    return microbatches + [microbatches[-1]._replace(share=0.0)] * idle


class FlatUnits:
    """The parameters of `layers` in flat units, sharded over `group`; this rank owns and steps a shard of each unit.

        units.begin()
        for microbatch in microbatches:            # as many on every rank
            with units.microbatch(last=microbatch is microbatches[-1]):
                loss(microbatch).backward()
        units.finish()                             # every unit has its gradient
        units.deliver(); optimizer_of_masters.step(); units.publish()

    A unit is a layer; two layers that share a parameter are one unit. Every parameter of `model` belongs to a layer.
    `Zero` adds the hooks that gather weights and sum gradients.

    Args:
        keeps_whole: whether every rank keeps all weights between the steps.
    """

    def __init__(
        self, model: nn.Module, layers: Sequence[nn.Module], group: dist.ProcessGroup, *, keeps_whole: bool
    ) -> None:
        # Even chunks, the least bytes: gloo's reduce_scatter sends twice as much, so both halves are ours there.
        self.collective = Collective(group, "backend" if dist.get_backend(group) == "nccl" else "direct")
        self.keeps_whole = keeps_whole
        groups, self.unit_of = grouped(model, layers)
        self.units = [FlatParameter(named, group.size(), group.rank(), keeps_whole=keeps_whole) for named in groups]

    @property
    def masters(self) -> list[nn.Parameter]:
        """Return the parameters of this rank's optimizer."""
        return [unit.master for unit in self.units]

    @property
    def gradients(self) -> list[Tensor]:
        """Return this rank's part of the summed gradients."""
        return [unit.shard.grad for unit in self.units if unit.shard.grad is not None]

    def begin(self) -> None:
        for unit in self.units:
            unit.clear_gradients()

    @contextmanager
    def microbatch(self, *, last: bool) -> Iterator[None]:  # noqa: ARG002
        """Surround forward and backward of a microbatch."""
        yield

    def finish(self) -> None:
        """Wait for the last sums."""

    def deliver(self) -> None:
        """Pass this rank's gradients to its optimizer."""
        for unit in self.units:
            unit.deliver()

    def publish(self) -> None:
        """After the optimizer's step, or a load: copy the new masters into the shards that are gathered."""
        for unit in self.units:
            unit.refresh()

    @torch.no_grad()
    def dense(self, unit: "FlatParameter", shard: Tensor) -> list[Tensor]:
        """Gather all ranks' `shard`s of `unit`, a collective; return them in the parameters' shapes, on every rank."""
        chunk = unit.padded(shard)
        whole = chunk.new_empty(unit.num_ranks * unit.chunk)
        self.collective.all_gather(whole, chunk)
        return unit.views(whole)


def grouped(model: nn.Module, layers: Sequence[nn.Module]) -> tuple[list[dict[str, nn.Parameter]], list[int]]:
    """Return each unit's parameters by name, and each layer's unit: its own, or that of a layer it shares with."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    owner: dict[nn.Parameter, int] = {}
    groups: list[dict[str, nn.Parameter]] = []
    unit_of = []
    for layer in layers:
        owners = {owner[parameter] for parameter in layer.parameters() if parameter in owner}
        assert len(owners) < 2, "a layer shares parameters with one other at most"
        index = min(owners, default=len(groups))
        groups += [{}] if index == len(groups) else []
        unit_of.append(index)
        for parameter in layer.parameters():
            owner[parameter] = index
            groups[index][names[parameter]] = parameter
    return groups, unit_of


class FlatParameter:
    """Some parameters as one flat vector, sharded over `num_ranks`.

    Args:
        named: the parameters by name, of one dtype and device; they become views of `whole`, with the same values.
        keeps_whole: whether this rank keeps the whole vector (ZeRO-1 and -2), and `local` is a part of it. Otherwise
            `local` has its own memory, and `whole` has memory only between `materialize` and `free` (ZeRO-3).
    """

    def __init__(self, named: dict[str, nn.Parameter], num_ranks: int, rank: int, *, keeps_whole: bool) -> None:
        self.named = named
        first = next(iter(named.values()))
        self.shapes = {name: parameter.shape for name, parameter in named.items()}
        self.numel = sum(shape.numel() for shape in self.shapes.values())
        self.num_ranks, self.rank = num_ranks, rank
        self.chunk = -(-self.numel // num_ranks)
        self.start = min(rank * self.chunk, self.numel)
        self.length = min(self.chunk, self.numel - self.start)
        self.whole = first.detach().new_zeros(num_ranks * self.chunk)
        for parameter, view in zip(named.values(), self.views(self.whole), strict=True):
            view.copy_(parameter.detach())
            parameter.data = view
        own = self.whole[rank * self.chunk :][: self.chunk]
        self.local = own if keeps_whole else own.clone()
        self.shard = self.master = nn.Parameter(self.local[: self.length])
        exact = torch.promote_types(own.dtype, torch.float32)
        if self.shard.dtype != exact:
            self.master = nn.Parameter(self.shard.detach().to(exact))
        if not keeps_whole:
            self.free()

    @property
    def label(self) -> str:
        """Name the unit by its layer, for the timeline: "unit 1"."""
        number = next((part for part in next(iter(self.named)).split(".") if part.isdecimal()), "")
        return f"unit {number}".rstrip()

    def views(self, flat: Tensor) -> list[Tensor]:
        """Return views of `flat`, a vector laid out like `whole`, in the parameters' shapes."""
        sizes = [shape.numel() for shape in self.shapes.values()]
        pieces = flat[: self.numel].split(sizes)
        return [piece.view(shape) for piece, shape in zip(pieces, self.shapes.values(), strict=True)]

    # --- the memory of the whole vector ---

    def materialize(self) -> Tensor:
        """Allocate the memory of `whole`, uninitialised; every parameter is a view of it already."""
        self.whole.untyped_storage().resize_(self.whole.nbytes)
        return self.whole

    def free(self) -> None:
        """Free the memory of `whole`; the storage stays, because autograd's saved tensors point to it."""
        self.whole.untyped_storage().resize_(0)

    # --- from gradient to weights ---

    def add_gradient(self, part: Tensor, *, keeps: bool) -> None:
        """Add a microbatch's `part` of the summed gradient; with `keeps` its memory is kept, and needs no copy."""
        if self.shard.grad is None:
            self.shard.grad = part if keeps else part.clone()
        else:
            self.shard.grad.add_(part)

    def clear_gradients(self) -> None:
        for parameter in (self.shard, self.master, *self.named.values()):
            parameter.grad = None

    def deliver(self) -> None:
        """Convert this rank's gradient to the dtype of the master weights, for the optimizer."""
        if self.master is not self.shard and self.shard.grad is not None:
            self.master.grad = self.shard.grad.to(self.master.dtype)

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the stepped master weights into the shard, and drop the converted gradient."""
        if self.master is not self.shard:
            self.shard.copy_(self.master)
            self.master.grad = None

    # --- for comparisons and checkpoints ---

    def padded(self, shard: Tensor) -> Tensor:
        """Return a chunk that begins with `shard`, which is as long as `master`."""
        chunk = torch.zeros(self.chunk, dtype=shard.dtype, device=self.whole.device)
        chunk[: self.length] = shard
        return chunk

    def pieces(self, shard: Tensor) -> Iterator[tuple[str, LocalShard]]:
        """Yield the pieces of parameters in this rank's `shard`, which is as long as `master`."""
        begin = 0
        for name, shape in self.shapes.items():
            end = begin + shape.numel()
            first, last = max(begin, self.start), min(end, self.start + self.length)
            if first < last:
                yield name, flat_piece(shard[first - self.start : last - self.start], first - begin, shape)
            begin = end


# PyTorch's own.


class FullySharded(StepsParameters):
    """A Strategy around a model that `fully_shard` has sharded; torch clips by the norm of all shards."""

    def __init__(self, model: Model, group: dist.ProcessGroup, config: Config) -> None:
        super().__init__(model, config)
        self.group = group

    def backward(self, microbatches: list[Microbatch]) -> Tensor:
        self.model.zero_grad()
        losses = [
            forward_backward(self.model, microbatch, number, self.group.size())
            for number, microbatch in enumerate(pad_microbatches(microbatches, self.config))
        ]
        return torch.stack(losses).sum()

    def full(self, kind: str) -> Iterator[tuple[str, Tensor]]:
        """Yield dense tensors on rank 0, gathered one by one; nothing on other ranks."""
        for label, tensor in self.held(kind):
            whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            if self.group.rank() == 0:
                yield label, whole
