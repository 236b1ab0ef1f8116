"""The classic mistakes of sharded training, made on purpose by LAB_BUG, each with the check that has to see it."""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from distlab.contract import Mistakes, Needs, replaced
from distlab.lab.config import Config
from distlab.lab.workload.model import outline
from distlab.lab.workload.optimizer import CLIP_EPSILON
from distlab.techniques.collectives.by_hand import Collective
from distlab.techniques.sharded import flat_parameter
from distlab.techniques.sharded.flat_parameter import FlatParameter, Sharded
from distlab.techniques.sharded.zero import ReduceScatterScheduler, Unshard, Zero

from .predictions import units

GATHERING = ("zero3",)
SUMMED_EARLY = ("zero2", *GATHERING)
BY_HAND = ("zero1", *SUMMED_EARLY)
mistake = Mistakes()


# --- the settings that hide one ---


def few_units(config: Config) -> str:
    """Without a layer beyond the next one there is nothing more to gather."""
    return "these sizes: it takes 4 layers" if len(outline(config).layers) < 4 else ""


def one_unit(config: Config) -> str:
    """With one layer its sum begins last in any case."""
    return "these sizes: it takes 2 layers" if len(units(config)) < 2 else ""


def nothing_left_over(config: Config) -> str:
    """Where the number of ranks divides all layers' sizes nothing is left over."""
    sizes = (sum(parameter.numel() for parameter in layer.parameters()) for layer in outline(config).layers)
    uneven = any(size % config.world_size for size in sizes)
    return "" if uneven else f"these sizes: every layer divides evenly by WORLD_SIZE={config.world_size}"


# --- the mistakes ---

Put: TypeAlias = Callable[..., Callable[..., Zero]]


def part_of_zero(attribute: str, *given: str) -> Put:
    """What makes a `Zero` with the wrong object, made of its attributes `given`, as its `attribute`."""

    def put(wrong: Callable[..., Any]) -> Callable[..., Zero]:
        def make(*args: Any, **kwargs: Any) -> Zero:
            zero = Zero(*args, **kwargs)
            setattr(zero, attribute, wrong(*(getattr(zero, name) for name in given)))
            return zero

        return make

    return put


gathered_by = partial(mistake, part="Zero", of=GATHERING, put=part_of_zero("unshard", "units", "collective"))
summed_by = partial(mistake, part="Zero", put=part_of_zero("summed", "collective"))


@gathered_by("gather_all", check="whole units", needs=Needs(ranks=1, proof=False, unless=few_units))
class AllAtOnce(Unshard):
    """The first layer that needs weights gathers all that follow: every step is right, and the whole model is
    there."""

    def begin(self, index: int) -> None:
        for each in range(index, len(self.units)):
            super().begin(each)


@summed_by("late_sums", check="sums", of=SUMMED_EARLY, needs=Needs(proof=False, unless=one_unit))
class LateSums(ReduceScatterScheduler):
    """Gradients are collected and summed when the backward pass is over: zero2 and zero3 hold all of them."""

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


@summed_by("kept_scratch", check="scratch", of=BY_HAND, needs=Needs(proof=False))
class KeptScratch(ReduceScatterScheduler):
    """What the other ranks send for a sum is never given back: (N-1)/N of the largest layer, at rest."""

    def __init__(self, collective: Collective) -> None:
        super().__init__(collective)
        collective.peers.memory.release = lambda: None  # type: ignore[method-assign]


@gathered_by("forgot_reshard", check="rest bytes", needs=Needs(proof=False))
class NeverFreed(Unshard):
    """Gathered weights are never freed: every step is right, and every rank holds the whole model."""

    def reshard(self, index: int) -> None:
        self.gathered[index] = False


@gathered_by("stale_gather", check="losses")
class NeverRefreshed(Unshard):
    """Weights that were gathered once are taken for good: they miss every update since."""

    def reshard(self, index: int) -> None:
        """Keep the unit as it is."""


class LostTail(FlatParameter):
    """Divides, and forgets the rest."""

    @property
    def length(self) -> int:
        return self._length

    @length.setter
    def length(self, length: int) -> None:
        self._length = min(self.numel // self.num_ranks, length)


@mistake("lost_shard_tail", check="weights", part="Zero", of=BY_HAND, needs=Needs(unless=nothing_left_over))
def without_tails(*args: Any, **kwargs: Any) -> Zero:
    """Each rank owns P/N parameters, rounded down: those that are left over are never updated."""
    with replaced(vars(flat_parameter), {"FlatParameter": LostTail}):
        return Zero(*args, **kwargs)


@mistake("per_rank_norm", check="clipped gradients", part="Sharded", of=BY_HAND, needs=Needs(clip=True))
class ClippedAlone(Sharded):
    """Each rank clips by the norm of its own shard: shards are scaled differently, and the gradient turns."""

    def update(self) -> None:
        norm = torch.stack([torch.linalg.vector_norm(gradient) for gradient in self.zero.gradients]).norm().item()
        for gradient in self.zero.gradients:
            gradient.mul_(min(1.0, (self.config.clip or norm) / (norm + CLIP_EPSILON)))
        self.zero.deliver()
        self.optimizer.step()
        self.zero.publish()
