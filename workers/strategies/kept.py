"""What a rank keeps of a stage's parameters, and how their gradients become one over all replicas.

Over a pipeline and its slices data parallelism is what it is over a whole model: `Replicas` keeps everything on every
replica and sums gradients in buckets, `Shards` is ZeRO. Both say of each tensor that an optimizer steps which part of
which parameter it is, so that whoever clips, saves or gathers need not know how it was laid out.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch.distributed as dist
from torch import Tensor, nn

from workers.config import Config
from workers.parallel.buckets import AllReduce, GradientBuckets
from workers.parallel.masters import Masters
from workers.parallel.phases import phase
from workers.parallel.piece import Piece
from workers.parallel.reducing import Reducer
from workers.parallel.sequence import sum_together
from workers.parallel.zero_by_rows import ZeroByRows

Named = Mapping[str, nn.Parameter]  # by dense name


class Entry(NamedTuple):
    """A tensor that an optimizer steps."""

    names: tuple[str, ...]  # of the parameters that it is, or that it has a part of
    stepped: nn.Parameter
    summed: nn.Parameter  # whose `grad` is the gradient, in the type of what computes: itself, or what it is copied to
    pieces: Callable[[Tensor], Iterable[tuple[str, Piece]]]  # a tensor of its shape, as parts of these parameters


class Kept(Reducer, Protocol):
    """Some parameters of a stage on this rank."""

    everywhere: bool  # whether every replica keeps the same

    def entries(self) -> list[Entry]:
        """What is stepped."""

    def deliver(self) -> None:
        """Hand the gradients to what is stepped."""

    def publish(self) -> None:
        """After the optimizer's step, or a load: what computes has the new weights."""


class Replicas(GradientBuckets):
    """`named` whole on every replica. 16-bit weights have float32 masters.

    Args:
        rows: of the parameters `whole` each rank of this group has a part of the gradient (sequence parallelism).
    """

    everywhere = True

    def __init__(
        self, named: Named, group: dist.ProcessGroup, config: Config, *, whole: Collection[nn.Parameter] = (),
        rows: dist.ProcessGroup | None = None, overlap: bool = True,
    ) -> None:  # fmt: skip
        nothing: AllReduce | None = (lambda _: None) if group.size() == 1 else None
        super().__init__(named.values(), group, config.bucket_mib * 2**20, all_reduce=nothing, overlap=overlap)
        self.named, self.rows = named, rows
        self.whole = [parameter for parameter in named.values() if parameter in set(whole)]
        computing = list(named.values())
        lower = computing[0].dtype.itemsize < 4
        self.masters = Masters(computing, [p.detach().float() for p in computing], kept=True) if lower else None

    def begin(self) -> None:
        """Begin a step: no gradients."""
        self.zero()

    microbatch = GradientBuckets.accumulate

    def finish(self) -> None:
        """Wait for all sums, and add up over the rows what every rank has a part of: sums may come in any order."""
        super().finish()
        if self.rows is not None and self.whole:
            parts = [p.grad for p in self.whole if p.grad is not None]
            with phase("all_reduce"):
                sums = sum_together(parts, self.rows)
            for part, total in zip(parts, sums, strict=True):
                part.copy_(total)

    def entries(self) -> list[Entry]:
        stepped = self.named.values() if self.masters is None else self.masters.parameters
        return [
            Entry((name,), master, parameter, lambda tensor, name=name: [(name, whole_piece(tensor))])  # type: ignore[misc]
            for (name, parameter), master in zip(self.named.items(), stepped, strict=True)
        ]

    def deliver(self) -> None:
        if self.masters is not None:
            self.masters.deliver(1.0)

    def publish(self) -> None:
        if self.masters is not None:
            self.masters.refresh()


class Shards(ZeroByRows):
    """ZeRO over the replicas of a stage: of each of `layers` this rank owns a run.

    Args:
        names: the dense name of each parameter: a stage may know a tied one by another.
    """

    everywhere = False

    def __init__(
        self, stage: nn.Module, layers: Sequence[nn.Module], group: dist.ProcessGroup, zero: int, *,
        names: Mapping[nn.Parameter, str], whole: Collection[nn.Parameter], rows: dist.ProcessGroup | None,
    ) -> None:  # fmt: skip
        super().__init__(stage, layers, group, zero, whole=whole, rows=rows)
        self.names = [{own: names[p] for own, p in unit.named.items()} for unit in self.units]

    def entries(self) -> list[Entry]:
        return [
            Entry(
                tuple(names.values()), unit.master, unit.shard,
                lambda shard, unit=unit, names=names: [(names[own], piece) for own, piece in unit.pieces(shard)],  # type: ignore[misc]
            )
            for unit, names in zip(self.units, self.names, strict=True)
        ]  # fmt: skip

    def _watch_layer(self, layer: nn.Module, place: int) -> None:
        super()._watch_layer(layer.runs[0] if isinstance(layer, Rest) else layer, place)


class Rest(nn.Module):
    """A layer's parameters but those that another stage holds too, in the place of the layer that runs."""

    def __init__(self, layer: nn.Module, shared: Collection[nn.Parameter]) -> None:
        super().__init__()
        self.own = nn.ParameterList([p for p in layer.parameters() if p not in set(shared)])
        self.runs = (layer,)  # in a tuple, or its parameters were this module's


def whole_piece(tensor: Tensor) -> Piece:
    """All of a tensor."""
    return Piece(tensor.shape, [((0,) * tensor.dim(), tensor)])


def shards_of(
    stage: nn.Module, layers: Sequence[nn.Module], group: dist.ProcessGroup, zero: int, *,
    names: Mapping[nn.Parameter, str], shared: Collection[nn.Parameter], whole: Collection[nn.Parameter],
    rows: dist.ProcessGroup | None,
) -> list[Shards]:  # fmt: skip
    """ZeRO over one stage.

    What another stage holds too is a unit of its own on both: alike, so that a rank's shard here lies opposite the same
    one there, and gradients are summed over the stages after they were summed over the replicas. It stays whole between
    the steps, since two layers far apart compute with it.
    """
    tied = [parameter for parameter in stage.parameters() if parameter in set(shared)]
    rest = [Rest(layer, tied) for layer in layers] if tied else layers
    own = Shards(stage, rest, group, zero, names=names, whole=whole, rows=rows)
    if not tied:
        return [own]
    both = Shards(stage, [nn.ParameterList(tied)], group, min(zero, 2), names=names, whole=whole, rows=rows)
    return [own, both]
