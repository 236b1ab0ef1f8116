"""Classic bugs of sharded training, injected by LAB_BUG, each with the check that must catch it."""

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


# --- settings that hide a bug ---


def few_units(config: Config) -> str:
    """Without a layer beyond the next one there is nothing else to gather."""
    return "these sizes: it takes 4 layers" if len(outline(config).layers) < 4 else ""


def one_unit(config: Config) -> str:
    """With one layer, its sum begins last in any case."""
    return "these sizes: it takes 2 layers" if len(units(config)) < 2 else ""


def divides_evenly(config: Config) -> str:
    """If the number of ranks divides all layers' sizes, no shard has a remainder."""
    sizes = (sum(parameter.numel() for parameter in layer.parameters()) for layer in outline(config).layers)
    uneven = any(size % config.world_size for size in sizes)
    return "" if uneven else f"these sizes: every layer divides evenly by WORLD_SIZE={config.world_size}"


# --- the bugs ---

Put: TypeAlias = Callable[..., Callable[..., Zero]]


def replacing(attribute: str, *attributes: str) -> Put:
    """Build a `Zero` whose `attribute` is replaced by a wrong object, made from its `attributes`."""

    def put(wrong: Callable[..., Any]) -> Callable[..., Zero]:
        def build(*args: Any, **kwargs: Any) -> Zero:
            zero = Zero(*args, **kwargs)
            setattr(zero, attribute, wrong(*(getattr(zero, name) for name in attributes)))
            return zero

        return build

    return put


wrong_unshard = partial(mistake, part="Zero", of=GATHERING, put=replacing("unshard", "units", "collective"))
wrong_sums = partial(mistake, part="Zero", put=replacing("summed", "collective"))


@wrong_unshard("gather_all", check="whole units", needs=Needs(ranks=1, proof=False, unless=few_units))
class GatherAll(Unshard):
    """The first layer that needs weights gathers those of all later layers: every step is right, but the whole model is
    in memory."""

    def begin(self, index: int) -> None:
        for each in range(index, len(self.units)):
            super().begin(each)


@wrong_sums("late_sums", check="sums", of=SUMMED_EARLY, needs=Needs(proof=False, unless=one_unit))
class LateSums(ReduceScatterScheduler):
    """Gradients are collected, and summed after the backward pass: zero2 and zero3 store all of them."""

    def __init__(self, collective: Collective) -> None:
        super().__init__(collective)
        self.waiting: list[tuple[FlatParameter, Tensor, bool]] = []

    def make_room(self) -> None:
        """Do not wait: no sum is running."""

    def begin(self, unit: FlatParameter, flat: Tensor, *, keeps_flat: bool) -> None:
        self.waiting.append((unit, flat, keeps_flat))

    def finish(self) -> None:
        waiting, self.waiting = self.waiting, []
        for unit, flat, keeps_flat in waiting:
            super().begin(unit, flat, keeps_flat=keeps_flat)
        super().finish()


@wrong_sums("kept_scratch", check="scratch", of=BY_HAND, needs=Needs(proof=False))
class KeptScratch(ReduceScatterScheduler):
    """Receive buffers of a sum are never freed: (N-1)/N of the largest layer, at rest."""

    def __init__(self, collective: Collective) -> None:
        super().__init__(collective)
        collective.peers.memory.release = lambda: None  # type: ignore[method-assign]


@wrong_unshard("forgot_reshard", check="rest bytes", needs=Needs(proof=False))
class NeverFreed(Unshard):
    """Gathered weights are never freed: every step is right, but every rank stores the whole model."""

    def reshard(self, index: int) -> None:
        self.gathered[index] = False


@wrong_unshard("stale_gather", check="losses")
class NeverRefreshed(Unshard):
    """Weights are gathered only once: they miss all later updates."""

    def reshard(self, index: int) -> None:
        """Keep the gathered unit."""


class LostTail(FlatParameter):
    """Divides without the remainder."""

    @property
    def length(self) -> int:
        return self._length

    @length.setter
    def length(self, length: int) -> None:
        self._length = min(self.numel // self.num_ranks, length)


@mistake("lost_shard_tail", check="weights", part="Zero", of=BY_HAND, needs=Needs(unless=divides_evenly))
def without_tails(*args: Any, **kwargs: Any) -> Zero:
    """Each rank owns P/N parameters, rounded down: the remaining ones are never updated."""
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
