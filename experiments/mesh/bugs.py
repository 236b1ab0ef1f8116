"""Classic bugs of combined axes, injected by LAB_BUG; all but the last were found in public repositories."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from distlab.contract import Mistakes, Needs
from distlab.lab.config import Config
from distlab.lab.workload.data import Microbatch
from distlab.lab.workload.model import Dropouts
from distlab.techniques.data_parallel.buckets import GradientBuckets
from distlab.techniques.mesh.reducing_pipeline import ReducingPipeline
from distlab.techniques.mesh.strategy import Replicas, Stacked, StageShard
from distlab.techniques.pipeline_parallel.schedules import Action
from distlab.techniques.pipeline_parallel.strategy import sum_shared

from .placement import axes
from .stack import StageStores, own_masks

STORES = ("1f1b", "zero1")  # replicated and sharded
BY_ROWS = ("sequence", "zero2")
BY_POSITIONS = ("1f1b", "zero2", "ulysses")
DROPPED = ("1f1b", "zero2")
mistake = Mistakes()


# --- settings that hide a bug ---


def short(axis: str) -> Callable[[Config], str]:
    """Return a sentence if this axis is one rank long."""
    sentence = f"a mesh without {axis}: give LAB_MESH a {axis} of 2 or more"
    return lambda config: sentence if axes(config)[axis] == 1 else ""


def unreplicated(config: Config) -> str:
    """Return a sentence if no two ranks have the same parameters."""
    sizes = axes(config)
    return "" if sizes["dp"] * sizes["cp"] > 1 else "a mesh without dp and cp: give LAB_MESH a dp of 2 or more"


def untied(config: Config) -> str:
    """Return a sentence if no weight is on two stages."""
    if config.model != "gpt" or not config.tie:
        return "LAB_TIE=0 or another model than gpt: no two stages share a weight"
    return short("pp")(config)


def undropped(config: Config) -> str:
    """Return a sentence if nothing is dropped or replicated."""
    return short("dp")(config) if getattr(config.options, "dropout", 0) else "LAB_DROPOUT=0: nothing is dropped"


def rowless(config: Config) -> str:
    """Return a sentence if no rows are cut."""
    return short("tp")(config) if config.model == "gpt" else f"LAB_MODEL={config.model}: its rows are not cut"


# --- the bugs ---


@mistake(
    "norm_by_all", check="clipped gradients", part="Stacked", of=STORES, needs=Needs(clip=True, unless=short("tp"))
)
class CountedByAll(Stacked):
    """The norm counts parameters that all ranks of a slice have t times, once per rank (NeMo-RL pull request 3788)."""

    def in_norm(self, shard: StageShard) -> bool:
        return self.first_replica(shard) and self.first_stage(shard)


@mistake("tied_too_early", check="gradients", part="Stacked", of=("zero2",), needs=Needs(unless=untied))
class TiedTooEarly(Stacked):
    """A tied embedding's gradient is summed over the stages after ZeRO's shards were taken (Megatron-LM issue 844).

    It sums the gradient of a tied weight in the layers, from which ZeRO has already taken its shards.
    """

    def sum_over_stages(self) -> None:
        tied = {name: self.parts.parameters[name] for name in self.parts.shared if name in self.parts.parameters}
        copies = {name: nn.Parameter(parameter.detach()) for name, parameter in tied.items()}
        for name, copy in copies.items():
            gradient = tied[name].grad
            copy.grad = copy.detach().clone().zero_() if gradient is None else gradient.clone()
        if self.parts.shared:
            sum_shared(replace(self.parts, parameters=copies), self.stages)


@mistake("scaled_by_cp", check="gradients", part="Stacked", of=BY_POSITIONS, needs=Needs(unless=short("cp")))
class TimesCp(Stacked):
    """The loss is multiplied by the ranks along cp, but its gradients are summed over them anyway: c times too large
    (Megatron-LM issue 906)."""

    def backward(self, microbatches: list[Microbatch]) -> Tensor | None:
        return super().backward([each._replace(share=each.share * self.mesh.size("cp")) for each in microbatches])


@mistake(
    "armed_around",
    check="gradients",
    part="ReducingPipeline",
    of=("1f1b",),
    needs=Needs(microbatches=2, unless=unreplicated),
)
class ArmedAround(ReducingPipeline):
    """Buckets are armed for the whole pipeline, so its first backward pass launches them: sums of one microbatch
    (picotron pull request 5).

    They are waited for at once: otherwise the next pass adds to the running sum, which was correct by chance in one run
    of the tests.
    """

    def is_last(self, action: Action) -> bool:  # noqa: ARG002
        return True

    @contextmanager
    def reducing(self, action: Action) -> Iterator[None]:
        with super().reducing(action):
            yield
        for buckets in self.reducers[action.stage]:
            assert isinstance(buckets, GradientBuckets)
            for bucket in buckets.buckets:
                if bucket.handle is not None:
                    bucket.handle.wait()
                bucket.handle = None


@mistake("rows_not_summed", check="gradients", part="StageStores", of=BY_ROWS, needs=Needs(unless=rowless))
def rows_not_summed(*args: Any, rows: bool, zero: int) -> StageStores:  # noqa: ARG001
    """With sequence parallelism each rank has its rows' part of a norm's gradient, and the parts are never summed
    (Megatron-LM issue 1446)."""
    return StageStores(*args, rows=False, zero=zero)


class MasksByIndex(Dropouts):
    """Draws masks by a sample's index in its replica's microbatch, as generators with one seed on all replicas do."""

    def checksums(self, inputs: Tensor) -> list[int]:
        return list(range(len(inputs)))


@mistake("dropout_alike", check="losses", part="own_masks", of=DROPPED, needs=Needs(unless=undropped))
def equal_seeds(dropouts: Dropouts, *args: Any, rows: bool) -> None:
    """All replicas' generators have the same seed: dropout uses the same numbers for different samples (transformers
    issue 31412)."""
    own_masks(dropouts, *args, rows=rows)
    dropouts.__class__ = MasksByIndex


@mistake("late_buckets", check="overlap", part="Replicas", of=("1f1b",), needs=Needs(proof=False, unless=unreplicated))
def late_buckets(*args: Any, **kwargs: Any) -> Replicas:
    """Buckets are launched after the pipeline: correct, but nothing overlaps its last backward pass."""
    buckets = Replicas(*args, **kwargs)
    buckets.overlap = False
    return buckets
