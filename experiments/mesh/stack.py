"""The whole order of composition: slices of all layers, stages of those, what each replica keeps of a stage, one step.

Each line works on what the one before left, and none knows how: a pipeline cuts whatever layers there are, buckets and
shards take whatever parameters a stage has.
"""

from collections.abc import Callable
from typing import TypeAlias

import torch.distributed as dist
from torch import Tensor, nn

from workers.config import Config
from workers.contract import Strategy
from workers.parallel.mesh import Mesh
from workers.parallel.reducing import ReducingPipeline
from workers.parallel.schedules import Schedule
from workers.parallel.sequence import Sequence
from workers.parallel.slices import Slice, slices_of
from workers.parallel.stages import Parts
from workers.parallel.tensor import Whole
from workers.strategies.engines import ByHand
from workers.strategies.kept import Kept, Replicas, shards_of
from workers.strategies.pipelined import parts_of
from workers.strategies.pretended import pretend_compute
from workers.strategies.rows import rows_inside
from workers.strategies.slicing import slice_layers
from workers.strategies.stacked import Clip, Stacked, clip_over_all
from workers.workload.model import Model
from workers.workload.recompute import recomputed

# What a mistake replaces.
Groups: TypeAlias = Callable[[Mesh], dist.ProcessGroup]
Stacks: TypeAlias = type[Stacked]
Pipelines: TypeAlias = type[ReducingPipeline]


def over_dp(mesh: Mesh) -> dist.ProcessGroup:
    """The replicas of a stage's slice: whose gradients are summed."""
    return mesh["dp"]


def stack(
    model: Model, mesh: Mesh, config: Config, schedule: Schedule, *, chunks: int = 1, rows: bool = False,
    zero: int = 0, overlap: bool = True, pipelined: Pipelines = ReducingPipeline, stacked: Stacks = Stacked,
    clip: Clip = clip_over_all, group_of: Groups = over_dp, sums_rows: bool = True,
) -> Strategy:  # fmt: skip
    """Slices, then stages of them, then what is kept of each stage over the replicas, then one step around all."""
    rows = rows and mesh.size("tp") > 1
    slices = sliced(model, mesh, rows=rows)
    parts = parts_of(model, mesh["pp"], [*range(mesh.size("pp"))] * chunks)
    keep = Keep(parts, slices, mesh, config, rows=rows and sums_rows, zero=zero, overlap=overlap, group=group_of(mesh))
    kept = {number: keep.stage(number) for number in parts.stages}
    stages = {
        number: Turned(stage.layers, rows=rows, recompute=config.recompute) for number, stage in parts.stages.items()
    }
    pretend(stages, mesh, config)
    pipeline = pipelined(stages, schedule[mesh.index("pp")], mesh["pp"], kept)
    return stacked(parts, slices, kept, ByHand(pipeline, model.loss), mesh, config, clip)


def sliced(model: Model, mesh: Mesh, *, rows: bool) -> dict[str, Slice]:
    """This rank's slices of all layers, in place; says which parameters they are. With `rows` what lies between two
    slices is this rank's part of the rows."""
    if mesh.size("tp") == 1:
        return {}
    region = Sequence(mesh["tp"]) if rows else Whole(mesh["tp"])
    slice_layers(model, mesh["tp"], region)
    if isinstance(region, Sequence):
        rows_inside(model, region)
        region.num_rows = len(model.get_parameter("layers.0.position.weight"))  # a later stage meets no embedding
    return slices_of(model)


class Keep:
    """What is kept of this rank's stages: everything on each replica, or with `zero` shards of it."""

    def __init__(
        self, parts: Parts, slices: dict[str, Slice], mesh: Mesh, config: Config, *, rows: bool, zero: int,
        overlap: bool, group: dist.ProcessGroup,
    ) -> None:  # fmt: skip
        self.parts, self.mesh, self.config = parts, mesh, config
        self.zero, self.overlap, self.group = zero, overlap, group
        self.whole = [p for name, p in parts.parameters.items() if rows and name not in slices]
        self.shared = [parts.parameters[name] for name in parts.shared if name in parts.parameters]

    def stage(self, number: int) -> list[Kept]:
        """Of one stage."""
        stage, tp = self.parts.stages[number], self.mesh["tp"] if self.whole else None
        own = set(stage.parameters())
        named = {name: p for name, p in self.parts.parameters.items() if p in own}
        if not self.zero:
            return [Replicas(named, self.group, self.config, whole=self.whole, rows=tp, overlap=self.overlap)]
        names = {p: name for name, p in named.items()}
        layers = list(stage.layers.values())
        return [
            *shards_of(stage, layers, self.group, self.zero, names=names, shared=self.shared, whole=self.whole, rows=tp)
        ]


class Turned(nn.Module):
    """A stage's layers: samples come first in what it takes and gives, [b, S, ...]; inside of it rows, with `rows`."""

    def __init__(self, layers: nn.ModuleDict, *, rows: bool, recompute: bool) -> None:
        super().__init__()
        self.layers, self.rows, self.recompute = layers, rows, recompute

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden.transpose(0, 1) if self.rows else hidden
        for layer in self.layers.values():
            again = self.recompute and hidden.is_floating_point()  # an embedding keeps what it is given, and no more
            hidden = recomputed(layer, hidden) if again else layer(hidden)
        return hidden.transpose(0, 1) if self.rows else hidden


def pretend(stages: dict[int, Turned], mesh: Mesh, config: Config) -> None:
    """With LAB_SLEEP_MS stages pretend to compute longer, each replica's microbatches alike."""
    sleep_ms: float = getattr(config.options, "sleep_ms", 0.0)
    if sleep_ms:
        of_replica = config.model_copy(update={"batch": config.batch / mesh.size("dp")})
        pretend_compute(stages, of_replica, sleep_ms, {})
