"""The order of composition: positions of samples, slices of layers, stages of slices, replicas of stages, one step.

Each line works on the result of the one before, without knowing it: a pipeline cuts whatever layers there are, buckets
and shards use whatever parameters a stage has.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import Tensor, nn

from distlab.contract import Strategy
from distlab.lab.config import Config
from distlab.lab.workload.data import Microbatch
from distlab.lab.workload.model import Dropouts, Model, recomputed
from distlab.techniques.collectives.sharded_tensor import whole_piece
from distlab.techniques.context_parallel.ring import RingAttention
from distlab.techniques.context_parallel.strategy import Positions, own_positions, parallelize
from distlab.techniques.context_parallel.ulysses import UlyssesAttention
from distlab.techniques.mesh.grid import Mesh
from distlab.techniques.mesh.reducing_pipeline import ReducingPipeline
from distlab.techniques.mesh.strategy import Entry, ParameterStore, Replicas, Stacked, shards_of
from distlab.techniques.pipeline_parallel.pretend import pretend_compute
from distlab.techniques.pipeline_parallel.schedules import one_forward_one_backward
from distlab.techniques.pipeline_parallel.strategy import (
    ByHand,
    Lesson,
    Parts,
    parts_of,
)
from distlab.techniques.tensor_parallel.layers import (
    ReplicatedRegion,
    SequenceParallelRegion,
    Slice,
    rows_inside,
    slices_of,
)
from distlab.techniques.tensor_parallel.strategy import slice_by_lesson, slice_layers

from . import lesson
from .placement import HOW


def stack(model: Model, mesh: Mesh, config: Config, *, name: str) -> Strategy:
    """Build the variant `name`: cut positions, slice layers, cut stages, store each stage over its replicas, then wrap
    all in one step."""
    how, schedule = HOW[name], one_forward_one_backward(mesh.size("pp"), config.num_microbatches)
    rows = how.rows and model.name == "gpt" and mesh.size("tp") > 1
    positions = how.cut(config.seq, mesh.size("cp")) if mesh.size("cp") > 1 else None
    if positions is not None:
        attention = (UlyssesAttention if how.swaps else RingAttention)(mesh["cp"], positions)
        parallelize(model, positions, attention, mesh.index("cp"))
    num_rows = config.seq if positions is None else positions.num_rows[mesh.index("cp")]
    slices = sliced(model, mesh, num_rows if rows else None)
    dropouts = model.dropouts
    if dropouts is not None:
        own_masks(dropouts, positions, mesh, rows=rows)
    parts = parts_of(model, mesh["pp"])
    stage_stores = StageStores(parts, slices, mesh, config, rows=rows, zero=how.zero)
    stores = {number: stage_stores.stage(number) for number in parts.stages}
    stages = {
        number: TransposedStage(stage.layers, rows=rows, recompute=config.recompute)
        for number, stage in parts.stages.items()
    }
    callbacks = {} if dropouts is None else {"turn_to": dropouts.begin_microbatch}
    pipeline = ReducingPipeline(stages, schedule[mesh.index("pp")], mesh["pp"], stores, **callbacks)
    pretend(pipeline, mesh, config)
    engine = ByHand(pipeline, model.loss, partial(prepared, positions, mesh.index("cp"), dropouts))
    return Stacked(parts, slices, stores, engine, mesh, config)


def plain(model: Model, mesh: Mesh, config: Config) -> Strategy:
    """Build the lesson on one page, in the same order."""
    slices = slice_by_lesson(model, mesh["tp"], lesson.slice_layers) if mesh.size("tp") > 1 else {}
    parts = parts_of(model, mesh["pp"])
    ((number, stage),) = parts.stages.items()
    rows = (config.seq,) if model.name == "gpt" else ()
    transposed = TransposedStage(stage.layers, rows=False, recompute=config.recompute)
    pipeline = lesson.Pipeline(transposed, model.loss, (*rows, config.width), mesh["pp"])
    stores = {number: [LessonStore(parts.parameters)]}
    return Stacked(parts, slices, stores, Lesson(pipeline, mesh["dp"]), mesh, config)


class LessonStore:
    """All of `named` on every replica, with gradients summed after the pipeline."""

    everywhere = True

    def __init__(self, named: Mapping[str, nn.Parameter]) -> None:
        self.named = named

    def begin(self) -> None:
        for parameter in self.named.values():
            parameter.grad = None

    def microbatch(self, *, last: bool) -> AbstractContextManager[None]:  # noqa: ARG002
        return nullcontext()

    def finish(self) -> None:
        """Do nothing, as in deliver and publish: the optimizer steps the computing weights directly."""

    deliver = publish = finish

    def entries(self) -> list[Entry]:
        return [
            Entry((name,), each, each, lambda tensor, name=name: [(name, whole_piece(tensor))])  # type: ignore[misc]
            for name, each in self.named.items()
        ]


def prepared(
    positions: Positions | None, place: int, dropouts: Dropouts | None, microbatches: list[Microbatch]
) -> list[Microbatch]:
    """Return this rank's positions of each microbatch; masks are drawn for the whole samples."""
    if dropouts is not None:
        dropouts.begin_step([microbatch.inputs for microbatch in microbatches])
    return microbatches if positions is None else own_positions(microbatches, positions, place)


def sliced(model: Model, mesh: Mesh, num_rows: int | None) -> dict[str, Slice]:
    """Replace all layers by this rank's slices, and return the slices by parameter name. With `num_rows` per sample,
    activations between two slices are this rank's part of the rows."""
    if mesh.size("tp") == 1:
        return {}
    region = ReplicatedRegion(mesh["tp"]) if num_rows is None else SequenceParallelRegion(mesh["tp"])
    slice_layers(model, mesh["tp"], region)
    if isinstance(region, SequenceParallelRegion) and num_rows is not None:
        rows_inside(model, region)
        region.num_rows = num_rows  # a later stage has no embedding
    return slices_of(model)


def own_masks(dropouts: Dropouts, positions: Positions | None, mesh: Mesh, *, rows: bool) -> None:
    """Cut each sample's mask, as one process draws it, to this rank's rows: its positions along cp, and its rows of
    those along tp."""
    if positions is None and not rows:
        return
    own = torch.arange(dropouts.shape[0]) if positions is None else positions.of(mesh.index("cp"))
    dropouts.rows = own.tensor_split(mesh.size("tp"))[mesh.index("tp")] if rows else own
    dropouts.rows_first = rows


class StageStores:
    """Creates the stores of this rank's stages: everything on each replica, or with `zero` shards."""

    def __init__(
        self, parts: Parts, slices: dict[str, Slice], mesh: Mesh, config: Config, *, rows: bool, zero: int
    ) -> None:
        self.parts, self.mesh, self.config, self.zero = parts, mesh, config, zero
        self.group = mesh.across("dp", "cp")  # ranks with other samples or positions, but the same slice of the stage
        self.replicated = [p for name, p in parts.parameters.items() if rows and name not in slices]
        self.shared = [parts.parameters[name] for name in parts.shared if name in parts.parameters]
        # With three ranks or more gloo's order of additions depends on the position in a buffer. Slices of different
        # size would shift replicated parameters differently on each rank of a slice, so those have separate buckets.
        self.separate = set(slices) if any(len(set(cut.sizes)) > 1 for cut in slices.values()) else set[str]()

    def stage(self, number: int) -> list[ParameterStore]:
        stage, tp = self.parts.stages[number], self.mesh["tp"] if self.replicated else None
        own = set(stage.parameters())
        named = {name: p for name, p in self.parts.parameters.items() if p in own}
        if not self.zero:
            parts = [{name: p for name, p in named.items() if (name in self.separate) is cut} for cut in (False, True)]
            return [
                Replicas(part, self.group, self.config, replicated=self.replicated, rows=tp) for part in parts if part
            ]
        names = {p: name for name, p in named.items()}
        layers = list(stage.layers.values())
        return [
            *shards_of(
                stage,
                layers,
                self.group,
                self.zero,
                names=names,
                shared=self.shared,
                replicated=self.replicated,
                rows=tp,
            )
        ]


class TransposedStage(nn.Module):
    """A stage's layers; inputs and outputs are [b, S, ...], samples first, but inside come rows first, with `rows`."""

    def __init__(self, layers: nn.ModuleDict, *, rows: bool, recompute: bool) -> None:
        super().__init__()
        self.layers, self.rows, self.recompute = layers, rows, recompute

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden.transpose(0, 1) if self.rows else hidden
        for layer in self.layers.values():
            again = self.recompute and hidden.is_floating_point()  # an embedding saves only its input
            hidden = recomputed(layer, hidden) if again else layer(hidden)
        return hidden.transpose(0, 1) if self.rows else hidden


def pretend(pipeline: ReducingPipeline, mesh: Mesh, config: Config) -> None:
    """With LAB_SLEEP_MS, let stages simulate longer compute, the same for each replica's microbatches."""
    sleep_ms: float = getattr(config.options, "sleep_ms", 0.0)
    if sleep_ms:
        replica_config = config.model_copy(update={"batch": config.batch / mesh.size("dp")})
        pretend_compute(pipeline.stages, replica_config, sleep_ms, {})
