"""One model on a grid of axes: its layers sliced, cut into stages and replicated; a step, and the dense tensors back.

The techniques combine because each works on the result of the one before it: tensor parallelism replaces layers, a
pipeline takes runs of the layers that are there then, data parallelism sums the parameters of each stage. This file has
what belongs to no single axis: which gradients are summed over which ranks after the pipeline, the norm that counts
each element once, and the position of each part in the dense model.

  over dp   every stage's gradients, in its last backward pass (reducing_pipeline.py); over cp together with dp, since
            ranks with other positions are replicas like those with other samples
  over tp   parameters that sequence parallelism replicates but uses on its rows only (below)
  over pp   a weight that two stages share, after the sums over dp: its shards are at the same positions
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distlab.lab.config import Config
from distlab.lab.workload.data import Microbatch
from distlab.lab.workload.optimizer import clip_gradients, in_order, make_optimizer, prime, tensors_of
from distlab.techniques.collectives.point_to_point import Peers
from distlab.techniques.collectives.sharded_tensor import LocalShard, whole_piece
from distlab.techniques.data_parallel.buckets import AllReduce, GradientBuckets
from distlab.techniques.mesh.grid import Mesh
from distlab.techniques.mesh.reducing_pipeline import Reducer
from distlab.techniques.pipeline_parallel.strategy import Engine, Parts, sum_shared
from distlab.techniques.precision import Masters
from distlab.techniques.sharded.flat_parameter import pad_microbatches
from distlab.techniques.sharded.zero import Zero
from distlab.techniques.tensor_parallel.layers import Slice, sum_together

# ZeRO with sequence parallelism: partial gradients are summed over the ranks that have the other rows.
#
# With sequence parallelism a rank has only its own rows between two slices, so a norm's gradient there is partial
# (layers.py). ZeRO concatenates a layer's gradients, sums that vector over the replicas, and keeps a run of it on each
# rank. Along the tensor axis these runs begin and end at different positions, since slices differ in size, so after
# ZeRO's sum the partial gradients no longer match. They are therefore summed before it, in the unit's vector, as soon
# as its last gradient is written.


class SequenceParallelZero(Zero):
    """`Zero` where the gradients of the parameters `replicated` are partial on each rank of `rows`."""

    def __init__(
        self, model: nn.Module, layers: Sequence[nn.Module], group: dist.ProcessGroup, stage: int, *,
        replicated: Collection[nn.Parameter], rows: dist.ProcessGroup | None,
    ) -> None:  # fmt: skip
        self.replicated, self.rows = set(replicated), rows
        super().__init__(model, layers, group, stage)

    @torch.no_grad()
    def _complete(self, index: int) -> None:
        if self.rows is not None and (self.stage > 1 or self._last):  # stage 1 keeps the vector and sums it once
            flat = self._flat_gradient(index)
            named = zip(self.units[index].named.values(), flat.places, strict=True)
            parts = [place for parameter, place in named if parameter in self.replicated]
            if parts:
                sum_together(parts, self.rows)
        super()._complete(index)


# How a rank stores a stage's parameters, and how their gradients are summed over all replicas.
#
# Data parallelism over a stage and its slices works as over a whole model: `Replicas` stores all on every replica and
# sums gradients in buckets, `Shards` is ZeRO. Both describe each tensor of the optimizer as a part of a parameter, so
# that clipping, saving and gathering do not depend on the layout.

Named = Mapping[str, nn.Parameter]  # by dense name


class Entry(NamedTuple):
    """A tensor that the optimizer steps."""

    names: tuple[str, ...]  # of the parameters that it contains, whole or in part
    stepped: nn.Parameter
    summed: nn.Parameter  # has the gradient, in the computing dtype: itself, or its 16-bit copy
    pieces: Callable[[Tensor], Iterable[tuple[str, LocalShard]]]  # a tensor of its shape, as parts of these parameters


class ParameterStore(Reducer, Protocol):
    """Stores some parameters of a stage on this rank."""

    everywhere: bool  # whether every replica stores the same

    def entries(self) -> list[Entry]:
        """Return the tensors that the optimizer steps."""

    def deliver(self) -> None:
        """Copy the gradients to the tensors that the optimizer steps."""

    def publish(self) -> None:
        """Copy new weights to the parameters that compute, after the optimizer's step or a load."""


class Replicas(GradientBuckets):
    """All parameters of `named` on every replica. 16-bit weights have float32 masters.

    Args:
        rows: the group over which gradients of the parameters `replicated` are partial (sequence parallelism).
    """

    everywhere = True

    def __init__(
        self, named: Named, group: dist.ProcessGroup, config: Config, *, replicated: Collection[nn.Parameter] = (),
        rows: dist.ProcessGroup | None = None,
    ) -> None:  # fmt: skip
        nothing: AllReduce | None = (lambda _: None) if group.size() == 1 else None
        super().__init__(named.values(), group, config.bucket_mib * 2**20, all_reduce=nothing)
        self.named, self.rows = named, rows
        self.replicated = [parameter for parameter in named.values() if parameter in set(replicated)]
        computing = list(named.values())
        lower = computing[0].dtype.itemsize < 4
        self.masters = Masters(computing, [p.detach().float() for p in computing], persistent=True) if lower else None

    def begin(self) -> None:
        self.zero()

    microbatch = GradientBuckets.accumulate

    def finish(self) -> None:
        """Wait for all sums, and sum partial gradients over the rows; sums commute, so their order does not matter."""
        super().finish()
        if self.rows is not None and self.replicated:
            sum_together([p.grad for p in self.replicated if p.grad is not None], self.rows)

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


class Shards(SequenceParallelZero):
    """ZeRO over the replicas of a stage: this rank owns a run of each of `layers`.

    Args:
        names: the dense name of each parameter: a stage may name a tied one differently.
    """

    everywhere = False

    def __init__(
        self, stage: nn.Module, layers: Sequence[nn.Module], group: dist.ProcessGroup, zero: int, *,
        names: Mapping[nn.Parameter, str], replicated: Collection[nn.Parameter], rows: dist.ProcessGroup | None,
    ) -> None:  # fmt: skip
        super().__init__(stage, layers, group, zero, replicated=replicated, rows=rows)
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
        super()._watch_layer(layer.runs[0] if isinstance(layer, UntiedParameters) else layer, place)


class UntiedParameters(nn.Module):
    """The parameters of a layer without those that another stage has too; it takes the place of the layer in ZeRO."""

    def __init__(self, layer: nn.Module, shared: Collection[nn.Parameter]) -> None:
        super().__init__()
        self.own = nn.ParameterList([p for p in layer.parameters() if p not in set(shared)])
        self.runs = (layer,)  # a tuple, so that its parameters are not registered here


def shards_of(
    stage: nn.Module, layers: Sequence[nn.Module], group: dist.ProcessGroup, zero: int, *,
    names: Mapping[nn.Parameter, str], shared: Collection[nn.Parameter], replicated: Collection[nn.Parameter],
    rows: dist.ProcessGroup | None,
) -> list[Shards]:  # fmt: skip
    """Return ZeRO over one stage.

    Parameters that another stage has too form a separate unit, laid out equally on both: a rank's shard here matches
    the one there, and gradients are summed over the stages after the sum over the replicas. The unit stays whole
    between steps, since two layers far apart compute with it.
    """
    tied = [parameter for parameter in stage.parameters() if parameter in set(shared)]
    untied_layers = [UntiedParameters(layer, tied) for layer in layers] if tied else layers
    own = Shards(stage, untied_layers, group, zero, names=names, replicated=replicated, rows=rows)
    if not tied:
        return [own]
    both = Shards(stage, [nn.ParameterList(tied)], group, min(zero, 2), names=names, replicated=replicated, rows=rows)
    return [own, both]


class StageShard(NamedTuple):
    """A part of a dense tensor on this rank."""

    label: str
    name: str  # of its parameter
    piece: LocalShard
    everywhere: bool  # whether every replica has the same


class Stacked:
    """A Strategy on a mesh with the axes dp, cp, tp and pp.

    Args:
        parts: this rank's stages, whose layers are sliced already.
        slices: which parameters are slices, by dense name.
        kept: the stores of the parameters of each stage.
        engine: sends microbatches through the stages.
    """

    def __init__(
        self, parts: Parts, slices: Mapping[str, Slice], stores: Mapping[int, Sequence[ParameterStore]], engine: Engine,
        mesh: Mesh, config: Config,
    ) -> None:  # fmt: skip
        self.parts, self.slices, self.engine, self.mesh, self.config = parts, slices, engine, mesh, config
        self.stores = [each for stage_stores in stores.values() for each in stage_stores]
        self.stages, self.ranks = Peers(mesh["pp"]), Peers(mesh.world)
        self.optimizer = make_optimizer([entry.stepped for entry in self.entries()], config)
        self.norm: Tensor | None = None  # of the last clipped gradient

    def backward(self, microbatches: list[Microbatch]) -> Tensor | None:
        """Send all microbatches of this replica through its pipeline, then finish all gradient sums."""
        for each in self.stores:
            each.begin()
        loss = self.engine.step(pad_microbatches(microbatches, self.config))
        for each in self.stores:
            each.finish()
        self.sum_over_stages()
        return loss if self.mesh.index("tp") == 0 else None  # the ranks of a slice have the same loss

    def sum_over_stages(self) -> None:
        """Sum the gradients of tied weights over both copies, or over the shards of both."""
        shared = set(self.parts.shared)
        if shared:
            summed = {name: entry.summed for entry in self.entries() for name in shared.intersection(entry.names)}
            sum_shared(replace(self.parts, parameters=summed), self.stages)

    @property
    def layers(self) -> dict[int, nn.Module]:
        return self.parts.layers

    def update(self) -> None:
        """Clip by the global norm, step this rank's parameters, and publish the new weights."""
        if self.config.clip is not None:
            once = [
                box for shard in filter(self.in_norm, self.local_shards("gradients")) for _, box in shard.piece.boxes
            ]
            gradients = [entry.summed.grad for entry in self.entries() if entry.summed.grad is not None]
            axes = (group for group in self.mesh.groups.values() if group.size() > 1)  # each element once over all
            self.norm = clip_gradients(once, gradients, self.config.clip, *axes)
        for each in self.stores:
            each.deliver()
        self.optimizer.step()
        for each in self.stores:
            each.publish()

    # --- positions in the dense model ---

    def entries(self) -> list[Entry]:
        return [entry for each in self.stores for entry in each.entries()]

    def local_shards(self, kind: str) -> Iterator[StageShard]:
        """Yield this rank's "gradients", "weights" or "optimizer" state."""
        for each in self.stores:
            for entry in each.entries():
                for key, tensor in tensors_of(kind, self.optimizer, entry.stepped, entry.summed).items():
                    parts = entry.pieces(tensor) if tensor.dim() else scalars(entry.names, tensor)
                    for name, part in parts:
                        yield StageShard(
                            f"{key}.{name}" if key else name, name, self.placed(name, part), each.everywhere
                        )

    def placed(self, name: str, part: LocalShard) -> LocalShard:
        """Return a part of this rank's slice as a part of the dense tensor."""
        cut = self.slices.get(name)
        return part if cut is None or not part.shape else cut.placed(part, self.mesh.index("tp"))

    def counts(self, shard: StageShard) -> bool:
        """Return whether it counts here: of all ranks with the same shard, on the first."""
        return self.first_slice(shard) and self.first_replica(shard) and self.first_stage(shard)

    def first_slice(self, shard: StageShard) -> bool:
        """Return whether this is the first rank that has it along tp; AdamW's step counts are on all of them."""
        return (shard.name in self.slices and bool(shard.piece.shape)) or self.mesh.index("tp") == 0

    def first_replica(self, shard: StageShard) -> bool:
        sharded = not shard.everywhere and bool(shard.piece.shape)
        return sharded or self.mesh.index("dp") == self.mesh.index("cp") == 0

    def first_stage(self, shard: StageShard) -> bool:
        return self.parts.holders[shard.name][0] == self.mesh.index("pp")

    def in_norm(self, shard: StageShard) -> bool:
        return self.counts(shard)

    def counted_shards(self, kind: str) -> Iterator[StageShard]:
        """Yield what counts on this rank: over all ranks each element of the dense model once."""
        return filter(self.counts, self.local_shards(kind))

    def full(self, kind: str) -> Iterator[tuple[str, Tensor]]:
        """Yield dense tensors on rank 0, in the model's order; nothing elsewhere."""
        pieces = [(shard.label, shard.piece) for shard in self.counted_shards(kind)]
        return in_order(pieces, self.ranks, self.parts.holders)

    def alike(self, kind: str) -> Iterator[tuple[str, Tensor]]:
        """Yield what all replicas have: equal along dp, and along tp if it is no slice. Shards are on one rank each."""
        for shard in self.local_shards(kind):
            if shard.everywhere:
                own = f" slice {self.mesh.index('tp')}" if shard.name in self.slices else ""
                ((_, tensor),) = shard.piece.boxes
                yield f"{shard.label}{own}", tensor

    def state_dict(self) -> dict[str, Any]:
        """Return whole tensors for parameters that this rank has whole, and pieces for the others."""
        prime(self.optimizer)
        state: dict[str, Any] = {}
        for kind in ("weights", "optimizer"):
            for shard in self.local_shards(kind):
                whole = shard.everywhere and all(box.shape == shard.piece.shape for _, box in shard.piece.boxes)
                state[f"{kind}.{shard.label}"] = shard.piece.boxes[0][1] if whole else shard.piece
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: ARG002  it was filled in place
        """Publish the loaded weights to the parameters that compute."""
        for each in self.stores:
            each.publish()


def scalars(names: Sequence[str], value: Tensor) -> list[tuple[str, LocalShard]]:
    return [(name, LocalShard(value.shape, [((), value)])) for name in names]
