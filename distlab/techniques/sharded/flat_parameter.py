"""A flat unit: the parameters of a layer as one vector, of which every rank owns a run.

Sharding a layer tensor by tensor would cost a call for each, and some tensors have fewer rows than there are ranks.
Laid end to end they are one vector that any number of ranks can share (Zhao et al. 2023, "PyTorch FSDP", section
3.2.1): one call gathers the layer, and a rank's share of it may begin in the middle of one matrix and end in the middle
of the next.

    whole   [N·c]  all parameters of the unit, views of it, c = ceil(P/N); the last N·c - P numbers are padding, so
                   that all messages are of one size
    local   [c]    this rank's chunk of it
    shard   [<=c]  the chunk without padding: uneven over the ranks, the last may own nothing; its `grad` is the summed
            gradient
    master  [<=c]  what the optimizer steps: the shard, or a copy of it in float32 where the weights are lower
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias

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


class FlatParameter:
    """Some parameters, laid flat and shared out over `num_ranks`.

    Args:
        named: the parameters by name, of one dtype and device; they become views of `whole`, their numbers stay.
        keeps_whole: whether this rank keeps the whole vector (ZeRO-1 and -2), of which `local` then is a part.
            Otherwise `local` has memory of its own, and `whole` only between `materialize` and `free` (ZeRO-3).
    """

    def __init__(self, named: dict[str, nn.Parameter], num_ranks: int, rank: int, *, keeps_whole: bool) -> None:
        self.named = named
        first = next(iter(named.values()))
        self.shapes = {name: parameter.shape for name, parameter in named.items()}
        self.numel = sum(shape.numel() for shape in self.shapes.values())
        self.num_ranks, self.rank = num_ranks, rank
        self.chunk = -(-self.numel // num_ranks)
        self.start = min(rank * self.chunk, self.numel)
        self.length = self.owned()
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
        """Which layer it is, for the marks of its messages: "unit 1"."""
        number = next((part for part in next(iter(self.named)).split(".") if part.isdecimal()), "")
        return f"unit {number}".rstrip()

    def owned(self) -> int:
        return min(self.chunk, self.numel - self.start)

    def views(self, flat: Tensor) -> list[Tensor]:
        """The parameters' places in a vector laid out like `whole`."""
        sizes = [shape.numel() for shape in self.shapes.values()]
        pieces = flat[: self.numel].split(sizes)
        return [piece.view(shape) for piece, shape in zip(pieces, self.shapes.values(), strict=True)]

    # --- the whole vector comes and goes ---

    def materialize(self) -> Tensor:
        """Give `whole` its memory, of unknown content; every parameter is a view of it already."""
        self.whole.untyped_storage().resize_(self.whole.nbytes)
        return self.whole

    def free(self) -> None:
        """Let go of the memory of `whole`: it stays the same storage, which autograd's saved tensors still point to."""
        self.whole.untyped_storage().resize_(0)

    # --- from gradient to weights ---

    def add_gradient(self, part: Tensor, *, keeps: bool) -> None:
        """Add a microbatch's `part` of the summed gradient; `keeps`: it stays as it is, and may be taken itself."""
        if self.shard.grad is None:
            self.shard.grad = part if keeps else part.clone()
        else:
            self.shard.grad.add_(part)

    def forget_gradients(self) -> None:
        for parameter in (self.shard, self.master, *self.named.values()):
            parameter.grad = None

    def deliver(self) -> None:
        """Show the optimizer this rank's gradient, in the type and at the place of the master weights."""
        if self.master is not self.shard and self.shard.grad is not None:
            self.master.grad = self.shard.grad.to(self.master.dtype)

    @torch.no_grad()
    def refresh(self) -> None:
        """Take the stepped master weights as weights; the gradient that was converted for the optimizer is dropped."""
        if self.master is not self.shard:
            self.shard.copy_(self.master)
            self.master.grad = None

    # --- for those who ask ---

    def padded(self, shard: Tensor) -> Tensor:
        """A chunk whose beginning is `shard`, which is as long as `master`."""
        chunk = torch.zeros(self.chunk, dtype=shard.dtype, device=self.whole.device)
        chunk[: self.length] = shard
        return chunk

    def pieces(self, shard: Tensor) -> Iterator[tuple[str, LocalShard]]:
        """What this rank's `shard`, as long as `master`, holds of each parameter, where it holds any of it."""
        begin = 0
        for name, shape in self.shapes.items():
            end = begin + shape.numel()
            first, last = max(begin, self.start), min(end, self.start + self.length)
            if first < last:
                yield name, flat_piece(shard[first - self.start : last - self.start], first - begin, shape)
            begin = end


class FlatUnits:
    """The parameters of `layers`, shared out over `group` in flat units; of each this rank owns and steps a shard.

        units.begin()
        for microbatch in microbatches:            # as many on every rank
            with units.microbatch(last=microbatch is microbatches[-1]):
                loss(microbatch).backward()
        units.finish()                             # every unit has its gradient
        units.deliver(); optimizer_of_masters.step(); units.publish()

    A unit is a layer; two layers that share a parameter are one. Every parameter of `model` belongs to a layer. When
    weights are gathered and gradients summed is left to whoever computes: `Zero` hears of it by hooks.

    Args:
        keeps_whole: whether every rank keeps all weights between the steps.
    """

    unit_class = FlatParameter

    def __init__(
        self, model: nn.Module, layers: Sequence[nn.Module], group: dist.ProcessGroup, *, keeps_whole: bool
    ) -> None:
        # Even chunks, the least bytes: gloo's reduce_scatter sends twice as much, so both halves are ours there.
        self.collective = Collective(group, "backend" if dist.get_backend(group) == "nccl" else "direct")
        self.keeps_whole = keeps_whole
        groups, self.unit_of = grouped(model, layers)
        self.units = [self.unit_class(named, group.size(), group.rank(), keeps_whole=keeps_whole) for named in groups]

    @property
    def masters(self) -> list[nn.Parameter]:
        """What the optimizer of this rank steps."""
        return [unit.master for unit in self.units]

    @property
    def gradients(self) -> list[Tensor]:
        """This rank's part of the summed gradients."""
        return [unit.shard.grad for unit in self.units if unit.shard.grad is not None]

    def begin(self) -> None:
        for unit in self.units:
            unit.forget_gradients()

    @contextmanager
    def microbatch(self, *, last: bool) -> Iterator[None]:  # noqa: ARG002
        """Around forward and backward of a microbatch."""
        yield

    def finish(self) -> None:
        """Wait for the last sums."""

    def deliver(self) -> None:
        """Hand this rank's gradients to its optimizer."""
        for unit in self.units:
            unit.deliver()

    def publish(self) -> None:
        """After the optimizer's step, or a load: the new weights are there for whoever gathers them."""
        for unit in self.units:
            unit.refresh()

    @torch.no_grad()
    def dense(self, unit: FlatParameter, shard: Tensor) -> list[Tensor]:
        """A collective: all ranks' `shard`s of `unit` as its parameters are shaped, on every rank."""
        chunk = unit.padded(shard)
        whole = chunk.new_empty(unit.num_ranks * unit.chunk)
        self.collective.all_gather(whole, chunk)
        return unit.views(whole)


def grouped(model: nn.Module, layers: Sequence[nn.Module]) -> tuple[list[dict[str, nn.Parameter]], list[int]]:
    """The parameters of each unit by name, and the unit of each layer: its own, or that of one it shares with."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    owner: dict[nn.Parameter, int] = {}
    groups: list[dict[str, nn.Parameter]] = []
    unit_of = []
    for layer in layers:
        known = {owner[parameter] for parameter in layer.parameters() if parameter in owner}
        assert len(known) < 2, "a layer shares parameters with one other at most"
        index = min(known, default=len(groups))
        groups += [{}] if index == len(groups) else []
        unit_of.append(index)
        for parameter in layer.parameters():
            owner[parameter] = index
            groups[index][names[parameter]] = parameter
    return groups, unit_of


# An optimizer's step on a piece of the flat vector of weights: plain SGD, or AdamW (Loshchilov and Hutter 2019).
#
# Both compute a weight from its own gradient and moments alone, so a piece is stepped like the whole, and pieces can
# be cut anew at any time. Nothing is changed in place: whoever steps may still take it back.

BETA_1, BETA_2, ADAM_EPSILON, DECAY = 0.9, 0.999, 1e-8, 0.01  # torch.optim.AdamW's own


class Piece(NamedTuple):
    """What is stepped: `weights` [n], and AdamW's moments as the two rows of [2, n]; SGD's have no rows, [0, n]."""

    weights: Tensor
    moments: Tensor


def fresh(weights: Tensor, optimizer: str) -> Piece:
    """The piece before the first step."""
    return Piece(weights.clone(), weights.new_zeros(2 if optimizer == "adamw" else 0, len(weights)))


def stepped(piece: Piece, gradient: Tensor, lr: float, number: int) -> Piece:
    """The piece after its step `number`, which counts from 1; `gradient` [n]."""
    weights, moments = piece
    if not len(moments):
        return Piece(weights - lr * gradient, moments)
    mean = moments[0].lerp(gradient, 1 - BETA_1)
    square = BETA_2 * moments[1] + (1 - BETA_2) * gradient * gradient
    size = lr / (1 - BETA_1**number)
    denominator = square.sqrt() / (1 - BETA_2**number) ** 0.5 + ADAM_EPSILON
    return Piece(weights * (1 - lr * DECAY) - size * mean / denominator, torch.stack([mean, square]))


# The step: a Strategy over sharded parameters (above, and zero.py).
#
# Every rank works on its own part of the batch, as in dp. What differs is what it keeps between the steps: the
# optimizer here steps flat shards, one a layer, and knows no other parameters.

Clip: TypeAlias = Callable[[list[Tensor], float, dist.ProcessGroup], None]


def clip_by_all(gradients: list[Tensor], bound: float, group: dist.ProcessGroup) -> None:
    """Clip this rank's shards by the norm of all ranks' shards together."""
    clip_gradients(gradients, gradients, bound, group)


class Sharded:
    """A Strategy: `model` computes with weights of which this rank owns a part, which `zero` keeps and gathers."""

    def __init__(
        self, model: Model, zero: FlatUnits, group: dist.ProcessGroup, config: Config, clip: Clip = clip_by_all
    ) -> None:
        self.model, self.zero, self.group, self.config, self.clip = model, zero, group, config, clip
        self.optimizer = make_optimizer(self.zero.masters, config)

    def backward(self, microbatches: list[Microbatch]) -> Tensor:
        shares: list[Tensor] = []
        self.zero.begin()
        for number, microbatch in enumerate(as_many_as_all(microbatches, self.config)):
            with self.zero.microbatch(last=number == self.config.num_microbatches - 1):
                shares.append(forward_backward(self.model, microbatch, number))
        self.zero.finish()
        return torch.stack(shares).sum()

    @property
    def layers(self) -> dict[int, nn.Module]:
        return dict(enumerate(self.model.layers))

    def update(self) -> None:
        """Clip by the norm of all shards together, step this rank's, and give the others what is new."""
        if self.config.clip is not None:
            self.clip(self.zero.gradients, self.config.clip, self.group)
        self.zero.deliver()
        self.optimizer.step()
        self.zero.publish()

    def full(self, kind: str) -> Iterator[tuple[str, Tensor]]:
        """Dense tensors on rank 0, gathered a unit at a time; nothing elsewhere."""
        for unit in self.zero.units:
            for key, shard in tensors_of(kind, self.optimizer, unit.master, unit.shard).items():
                tensors = self.zero.dense(unit, shard) if shard.dim() else [shard] * len(unit.named)
                for name, tensor in zip(unit.named, tensors, strict=True):
                    if self.group.rank() == 0:
                        yield f"{key}.{name}" if key else name, tensor

    def alike(self, kind: str) -> Iterator[tuple[str, Tensor]]:
        """Weights, where every rank keeps all of them; of gradients each has a part of its own."""
        if kind == "weights" and self.zero.keeps_whole:
            for unit in self.zero.units:
                yield from zip(unit.named, unit.views(unit.whole), strict=True)

    def state_dict(self) -> dict[str, Any]:
        """This rank's pieces of the dense tensors."""
        prime(self.optimizer)
        state: dict[str, Any] = {}
        for unit in self.zero.units:
            kept = {"": unit.master.detach()} | tensors_of("optimizer", self.optimizer, unit.master)
            for label, shard in kept.items():
                prefix = f"optimizer.{label}" if label else "weights"
                held = unit.pieces(shard) if shard.dim() else ((name, shard) for name in unit.named)
                state |= {f"{prefix}.{name}": piece for name, piece in held}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: ARG002  it was filled in place
        """The shards are loaded: every rank gets the others'."""
        self.zero.publish()


def as_many_as_all(microbatches: list[Microbatch], config: Config) -> list[Microbatch]:
    """A rank with fewer samples than microbatches works on its last again for nothing: the ranks' calls must meet."""
    idle = config.num_microbatches - len(microbatches)
    return microbatches + [microbatches[-1]._replace(share=0.0)] * idle


# The step around a model that PyTorch's `fully_shard` has taken over, whatever else was done to it before.


class FullySharded(StepsParameters):
    """A Strategy around a model that fully_shard has taken over; torch clips by the norm of all shards."""

    def __init__(self, model: Model, group: dist.ProcessGroup, config: Config) -> None:
        super().__init__(model, config)
        self.group = group

    def backward(self, microbatches: list[Microbatch]) -> Tensor:
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
