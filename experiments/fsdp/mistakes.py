"""The classic mistakes of sharded training, made on purpose by LAB_BUG, each with the check that has to see it."""

from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from experiments.fsdp.predictions import units
from workers.config import Config
from workers.contract import Instead, Mistake, Needs
from workers.parallel.clip import EPSILON
from workers.parallel.collectives import Collective
from workers.parallel.flat import FlatUnit
from workers.parallel.summed import Summed
from workers.parallel.unshard import Unshard
from workers.parallel.zero import Zero
from workers.strategies.sharded import Sharded
from workers.workload.model import Model, outline

BY_HAND, GATHERING = ("zero1", "zero2", "zero3", "zero3_kept"), ("zero3", "zero3_kept")


class NeverFreed(Unshard):
    """Gathers each unit whenever it is needed, into memory that it never gives back."""

    def reshard(self, index: int) -> None:
        self.there[index] = False


class NeverRefreshed(Unshard):
    """Never gathers a unit twice."""

    def reshard(self, index: int) -> None:
        """It is there already, so why gather it again?"""


class LostTail(FlatUnit):
    """Divides, and forgets the rest."""

    def owned(self) -> int:
        return min(self.numel // self.num_ranks, super().owned())


class AllAtOnce(Unshard):
    """Gathers all that is still to come with the first layer that needs something."""

    def begin(self, index: int) -> None:
        for each in range(index, len(self.units)):
            super().begin(each)


class LateSums(Summed):
    """Collects the gradients of all units, and sums them when the backward pass is over."""

    def __init__(self, collective: Collective) -> None:
        super().__init__(collective)
        self.waiting: list[tuple[FlatUnit, Tensor, bool]] = []

    def make_room(self) -> None:
        """There is always room."""

    def begin(self, unit: FlatUnit, flat: Tensor, *, keeps_flat: bool) -> None:
        self.waiting.append((unit, flat, keeps_flat))

    def finish(self) -> None:
        waiting, self.waiting = self.waiting, []
        for unit, flat, keeps_flat in waiting:
            super().begin(unit, flat, keeps_flat=keeps_flat)
        super().finish()


class KeptScratch(Summed):
    """Gives no memory back, since the next sum will need it too."""

    def __init__(self, collective: Collective) -> None:
        super().__init__(collective)
        collective.peers.release = lambda: None  # type: ignore[method-assign]


class GatherAll(Zero):
    unshard_class = AllAtOnce


class SumLate(Zero):
    summed_class = LateSums


class KeepScratch(Zero):
    summed_class = KeptScratch


class ForgotReshard(Zero):
    unshard_class = NeverFreed


class StaleGather(Zero):
    unshard_class = NeverRefreshed


class LostShardTail(Zero):
    unit_class = LostTail


class ClippedAlone(Summed):
    """Clips what this rank found by itself, before it is summed."""

    def __init__(self, collective: Collective, bound: float) -> None:
        super().__init__(collective)
        self.bound = bound

    def begin(self, unit: FlatUnit, flat: Tensor, *, keeps_flat: bool) -> None:
        clip_alone([flat], self.bound)
        super().begin(unit, flat, keeps_flat=keeps_flat)


class ClippedBeforeTheSum(Sharded):
    """Clips as soon as there are gradients, and not when they are summed."""

    def __init__(self, model: Model, zero: Zero, group: dist.ProcessGroup, config: Config) -> None:
        super().__init__(model, zero, group, config, clip=lambda *_: None)
        if config.clip is not None:
            zero.summed = ClippedAlone(zero.collective, config.clip)


def clip_alone(gradients: list[Tensor], bound: float, group: dist.ProcessGroup | None = None) -> None:  # noqa: ARG001
    """Scale `gradients` in place by their own norm, whatever the other ranks of `group` have."""
    norm = torch.stack([torch.linalg.vector_norm(gradient) for gradient in gradients]).norm().item()
    for gradient in gradients:
        gradient.mul_(min(1.0, bound / (norm + EPSILON)))


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


MISTAKES = {
    "gather_all": Mistake(
        "the first layer that needs weights gathers all that follow: every step is right, and the whole model is there",
        "whole units",
        Instead(GATHERING, {"zero": GatherAll}),
        Needs(ranks=1, proof=False, unless=few_units),
    ),
    "late_sums": Mistake(
        "gradients are collected and summed when the backward pass is over: zero2 and zero3 hold all of them",
        "sums",
        Instead(("zero2", "zero3", "zero3_kept"), {"zero": SumLate}),
        Needs(proof=False, unless=one_unit),
    ),
    "kept_scratch": Mistake(
        "what the other ranks send for a sum is never given back: (N-1)/N of the largest layer, at rest",
        "scratch",
        Instead(BY_HAND, {"zero": KeepScratch}),
        Needs(proof=False),
    ),
    "forgot_reshard": Mistake(
        "gathered weights are never freed: every step is right, and every rank holds the whole model",
        "rest bytes",
        Instead(GATHERING, {"zero": ForgotReshard}),
        Needs(proof=False),
    ),
    "stale_gather": Mistake(
        "weights that were gathered once are taken for good: they miss every update since",
        "losses",
        Instead(GATHERING, {"zero": StaleGather}),
    ),
    "lost_shard_tail": Mistake(
        "each rank owns P/N parameters, rounded down: those that are left over are never updated",
        "weights",
        Instead(BY_HAND, {"zero": LostShardTail}),
        Needs(unless=nothing_left_over),
    ),
    "per_rank_norm": Mistake(
        "each rank clips by the norm of its own shard: shards are scaled differently, and the gradient turns",
        "clipped gradients",
        Instead(BY_HAND, {"sharded": partial(Sharded, clip=clip_alone)}),
        Needs(clip=True),
    ),
    "local_clip": Mistake(
        "each rank clips its own gradient before the sum, to a bound that is meant for the sum",
        "clipped gradients",
        Instead(BY_HAND, {"sharded": ClippedBeforeTheSum}),
        Needs(clip=True),
    ),
}
