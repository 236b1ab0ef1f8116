"""The classic mistakes of sharded training, made on purpose by LAB_BUG, each with the check that has to see it."""

from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from distlab.contract import Mistakes, Needs
from distlab.lab.config import Config
from distlab.lab.workload.model import outline
from distlab.lab.workload.optimizer import CLIP_EPSILON
from distlab.techniques.collectives.by_hand import Collective
from distlab.techniques.sharded.flat_parameter import FlatParameter, Sharded
from distlab.techniques.sharded.zero import ReduceScatterScheduler, Unshard, Zero

from .predictions import units

GATHERING = ("zero3",)
SUMMED_EARLY = ("zero2", *GATHERING)
BY_HAND = ("zero1", *SUMMED_EARLY)
mistake = Mistakes()


# --- the settings that hide one ---


def few_units(config: Config) -> str:
    """Where there is nothing beyond the next layer, no one can gather too much."""
    return "these sizes: it takes 4 layers" if len(outline(config).layers) < 4 else ""


def one_unit(config: Config) -> str:
    """The sum of the only layer begins last either way."""
    return "these sizes: it takes 2 layers" if len(units(config)) < 2 else ""


def nothing_left_over(config: Config) -> str:
    """Where all layers divide evenly there is no tail to lose."""
    sizes = (sum(parameter.numel() for parameter in layer.parameters()) for layer in outline(config).layers)
    uneven = any(size % config.world_size for size in sizes)
    return "" if uneven else f"these sizes: every layer divides evenly by WORLD_SIZE={config.world_size}"


# --- the mistakes ---


class AllAtOnce(Unshard):
    """Gathers all that is still to come with the first layer that needs something."""

    def begin(self, index: int) -> None:
        for each in range(index, len(self.units)):
            super().begin(each)


@mistake(
    "gather_all", check="whole units", part="zero", of=GATHERING, needs=Needs(ranks=1, proof=False, unless=few_units)
)
class GatherAll(Zero):
    """The first layer that needs weights gathers all that follow: every step is right, and the whole model is
    there."""

    unshard_class = AllAtOnce


class LateSums(ReduceScatterScheduler):
    """Collects the gradients of all units, and sums them when the backward pass is over."""

    def __init__(self, collective: Collective) -> None:
        super().__init__(collective)
        self.waiting: list[tuple[FlatParameter, Tensor, bool]] = []

    def make_room(self) -> None:
        """There is always room."""

    def begin(self, unit: FlatParameter, flat: Tensor, *, keeps_flat: bool) -> None:
        self.waiting.append((unit, flat, keeps_flat))

    def finish(self) -> None:
        waiting, self.waiting = self.waiting, []
        for unit, flat, keeps_flat in waiting:
            super().begin(unit, flat, keeps_flat=keeps_flat)
        super().finish()


@mistake("late_sums", check="sums", part="zero", of=SUMMED_EARLY, needs=Needs(proof=False, unless=one_unit))
class SumLate(Zero):
    """Gradients are collected and summed when the backward pass is over: zero2 and zero3 hold all of them."""

    summed_class = LateSums


class KeptScratch(ReduceScatterScheduler):
    """Gives no memory back, since the next sum will need it too."""

    def __init__(self, collective: Collective) -> None:
        super().__init__(collective)
        collective.peers.memory.release = lambda: None  # type: ignore[method-assign]


@mistake("kept_scratch", check="scratch", part="zero", of=BY_HAND, needs=Needs(proof=False))
class KeepScratch(Zero):
    """What the other ranks send for a sum is never given back: (N-1)/N of the largest layer, at rest."""

    summed_class = KeptScratch


class NeverFreed(Unshard):
    """Gathers each unit whenever it is needed, into memory that it never gives back."""

    def reshard(self, index: int) -> None:
        self.there[index] = False


@mistake("forgot_reshard", check="rest bytes", part="zero", of=GATHERING, needs=Needs(proof=False))
class ForgotReshard(Zero):
    """Gathered weights are never freed: every step is right, and every rank holds the whole model."""

    unshard_class = NeverFreed


class NeverRefreshed(Unshard):
    """Never gathers a unit twice."""

    def reshard(self, index: int) -> None:
        """It is there already, so why gather it again?"""


@mistake("stale_gather", check="losses", part="zero", of=GATHERING)
class StaleGather(Zero):
    """Weights that were gathered once are taken for good: they miss every update since."""

    unshard_class = NeverRefreshed


class LostTail(FlatParameter):
    """Divides, and forgets the rest."""

    def owned(self) -> int:
        return min(self.numel // self.num_ranks, super().owned())


@mistake("lost_shard_tail", check="weights", part="zero", of=BY_HAND, needs=Needs(unless=nothing_left_over))
class LostShardTail(Zero):
    """Each rank owns P/N parameters, rounded down: those that are left over are never updated."""

    unit_class = LostTail


@mistake(
    "per_rank_norm",
    check="clipped gradients",
    part="sharded",
    of=BY_HAND,
    needs=Needs(clip=True),
    put=lambda clip: partial(Sharded, clip=clip),
)
def clip_alone(gradients: list[Tensor], bound: float, group: dist.ProcessGroup | None = None) -> None:  # noqa: ARG001
    """Each rank clips by the norm of its own shard: shards are scaled differently, and the gradient turns."""
    norm = torch.stack([torch.linalg.vector_norm(gradient) for gradient in gradients]).norm().item()
    for gradient in gradients:
        gradient.mul_(min(1.0, bound / (norm + CLIP_EPSILON)))
