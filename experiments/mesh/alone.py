"""A rank by itself: its stages, its slices and its positions do a step in their order, and all neighbours are made up.

What its passes hold is torch's affair: which tensors an operation saves, and what it leaves for the next. So it is
counted where nothing is sent, summed or kept: the neighbours are nobody (nobody.py), and a gradient goes as soon as it
is there. What a mesh keeps on top of that is a matter of formulas (peak.py).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from experiments.mesh.held import Rank
from experiments.mesh.nobody import FromNowhere, OwnScores, Place, RowsOfNobody, Unsummed
from experiments.mesh.stack import Turned, own_masks
from workers.lab import Lab
from workers.measure.formulas.peaks import Happening
from workers.parallel.positions import contiguous, zigzag
from workers.parallel.reducing import ReducingPipeline
from workers.parallel.schedules import Action
from workers.parallel.slices import shares
from workers.passes.counted import WARMUP_STEPS
from workers.passes.outline import Watch
from workers.strategies.context import OfOwnPositions, share_out
from workers.strategies.engines import ByHand, Engine
from workers.strategies.pipelined import parts_of
from workers.strategies.rows import rows_inside
from workers.strategies.sharded import as_many_as_all
from workers.strategies.slicing import slice_layers
from workers.workload.model import VOCABULARY, Model, causal


class Heard:
    """A Reducer that sums nothing, and notes the end of each backward pass."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    def begin(self) -> None: ...

    @contextmanager
    def microbatch(self, *, last: bool) -> Iterator[None]:  # noqa: ARG002
        """A pass of one microbatch."""
        yield
        self._watch.note("passed")

    def finish(self) -> None: ...


def passes_of(lab: Lab, rank: Rank, actions: list[Action]) -> list[Happening]:
    """The passes of a step on this rank, in the order of `actions`."""
    pipeline, engine = engine_of(lab, rank, actions)
    watch = Watch(lab.device)
    pipeline.reducers = {number: [Heard(watch)] for number in pipeline.stages}
    for stage in pipeline.stages.values():
        watch.over((int(index), layer) for index, layer in stage.get_submodule("layers").named_children())
    batches = lab.batches(getattr(torch, lab.config.dtype))
    watch.begin()
    with watch.storages:
        dealt = as_many_as_all(lab.dealt(batches, WARMUP_STEPS), lab.config)
        watch.note("dealt")
        engine.step(dealt)
    return watch.happenings


def engine_of(lab: Lab, rank: Rank, actions: list[Action]) -> tuple[ReducingPipeline, Engine]:
    """This rank's pipeline with nobody beside it, and what gives it microbatches."""
    config, mesh = lab.config, lab.mesh
    model = lab.model(getattr(torch, config.dtype))
    positions = (contiguous if rank.how.swaps else zigzag)(config.seq, rank.c) if rank.c > 1 else None
    if positions is not None:
        share_out(model, positions, causal, rank.at["cp"])
    if rank.t > 1:
        sliced(model, rank)
    like = next(model.parameters())
    place: Any = Place(rank, "pp")
    parts = parts_of(model, place, [*range(rank.p)] * rank.chunks)
    stages = {
        number: Turned(stage.layers, rows=rank.rows, recompute=config.recompute)
        for number, stage in parts.stages.items()
    }
    dropouts = model.dropouts
    if dropouts is not None:
        own_masks(dropouts, positions, mesh, rows=rank.rows)
        dropouts.deal([each.inputs for each in lab.dealt(lab.batches(like.dtype), WARMUP_STEPS)])
    turned = {} if dropouts is None else {"turn_to": dropouts.turn_to}
    pipeline = ReducingPipeline(stages, actions, mesh["pp"], {}, **turned)
    shape = (rank.own_rows(), config.width) if rank.is_gpt else (config.width,)
    nowhere: Any = FromNowhere(shape, like, rank.p * rank.chunks, copies=config.backend == "tcp")
    pipeline.boundaries = nowhere
    engine: Engine = ByHand(pipeline, model.loss)
    return pipeline, engine if positions is None else OfOwnPositions(engine, positions, rank.at["cp"])


def sliced(model: Model, rank: Rank) -> None:
    """This rank's slices of all layers, in place."""
    place: Any = Place(rank, "tp")
    region = RowsOfNobody(place, rank.seq) if rank.rows else Unsummed()
    slice_layers(model, place, region)
    if isinstance(region, RowsOfNobody):
        rows_inside(model, region)
    if rank.is_gpt:
        model.loss = OwnScores(sum(shares(VOCABULARY, rank.t)[: rank.at["tp"]]))
