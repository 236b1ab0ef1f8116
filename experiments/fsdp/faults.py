"""The classic mistakes of sharded training, made on purpose by LAB_BUG, each with the check that has to see it.

A mistake that cannot show in the run that was asked for is refused: a check that cannot fail would only look like one that
held.
"""

import math

import torch
import torch.distributed as dist
from torch import Tensor

from workers.config import Config
from workers.lab import Bug
from workers.parallel.clip import EPSILON, clip_gradients
from workers.parallel.flat import FlatUnit
from workers.parallel.gathered import Gathered
from workers.parallel.summed import Summed
from workers.parallel.zero import Zero
from workers.workload.model import outline

BUGS = {
    "forgot_reshard": Bug(
        "gathered weights are never freed: every step is right, and every rank holds the whole model", "rest bytes"
    ),
    "stale_gather": Bug("weights that were gathered once are taken for good: they miss every update since", "losses"),
    "lost_shard_tail": Bug(
        "each rank owns P/N parameters, rounded down: those that are left over are never updated", "weights"
    ),
    "per_rank_norm": Bug(
        "each rank clips by the norm of its own shard: shards are scaled differently, and the gradient turns",
        "clipped gradients",
    ),
    "local_clip": Bug(
        "each rank clips its own gradient before the sum, to a bound that is meant for the sum", "clipped gradients"
    ),
    "save_without_barrier": Bug(
        "rank 0 declares a checkpoint complete before the other ranks have written their shards", "checkpoint"
    ),
    "resume_repeats_epoch": Bug(
        "a resumed run begins its epoch anew: the samples that were seen before are seen twice", "resumed samples"
    ),
}

SEEN_IN = {  # the variants that can make the mistake, where not all can
    "forgot_reshard": ("zero3",),
    "stale_gather": ("zero3",),
    "lost_shard_tail": ("zero1", "zero2", "zero3"),
    "per_rank_norm": ("zero1", "zero2", "zero3"),
    "local_clip": ("zero1", "zero2", "zero3"),
}


class NeverFreed(Gathered):
    """Gathers each unit whenever it is needed, into memory that it never gives back."""

    def free(self, index: int) -> None:
        self.there[index] = False


class NeverRefreshed(Gathered):
    """Never gathers a unit twice."""

    def free(self, index: int) -> None:
        """It is there already, so why gather it again?"""


class LostTail(FlatUnit):
    """Divides, and forgets the rest."""

    def owned(self) -> int:
        return min(self.numel // self.num_ranks, super().owned())


class ClippedAlone(Summed):
    """Clips what this rank found by itself, before it is summed."""

    bound = 1.0

    def begin(self, unit: FlatUnit, flat: Tensor, *, keeps_flat: bool) -> None:
        clip_alone([flat], self.bound)
        super().begin(unit, flat, keeps_flat=keeps_flat)


def zero_of(config: Config) -> type[Zero]:
    """The sharded parameters that LAB_BUG asks for."""
    parts: dict[str, dict[str, type]] = {
        "forgot_reshard": {"gathered_class": NeverFreed},
        "stale_gather": {"gathered_class": NeverRefreshed},
        "lost_shard_tail": {"unit_class": LostTail},
        "local_clip": {"summed_class": type("ClippedAlone", (ClippedAlone,), {"bound": config.clip or math.inf})},
    }
    return type("Zero", (Zero,), parts.get(config.bug or "", {}))


def clip_alone(gradients: list[Tensor], bound: float) -> None:
    """Scale `gradients` in place by their own norm."""
    norm = torch.stack([torch.linalg.vector_norm(gradient) for gradient in gradients]).norm().item()
    for gradient in gradients:
        gradient.mul_(min(1.0, bound / (norm + EPSILON)))


def clip(gradients: list[Tensor], config: Config, group: dist.ProcessGroup) -> None:
    """Clip this rank's shards by the norm of all, or as LAB_BUG has it."""
    if config.clip is None or config.bug == "local_clip":
        return
    if config.bug == "per_rank_norm":
        clip_alone(gradients, config.clip)
    else:
        clip_gradients(gradients, gradients, config.clip, group)


def invisible(config: Config) -> list[str]:
    """A sentence if no check could see LAB_BUG with these settings."""
    bug, ranks = config.bug, config.world_size
    if bug is None or bug not in BUGS:
        return []
    makers = SEEN_IN.get(bug, config.variant)
    clips, saves = bug in ("per_rank_norm", "local_clip"), bug in ("save_without_barrier", "resume_repeats_epoch")
    reasons = [
        (not config.proof and bug not in ("forgot_reshard", "save_without_barrier"), "LAB_PROOF=0: nothing is compared"),
        (ranks == 1 and bug != "resume_repeats_epoch", "WORLD_SIZE=1: it takes two ranks"),
        (bool(config.variant) and not set(config.variant) & set(makers), f"these variants: it takes {' or '.join(makers)}"),
        (clips and config.clip is None, "LAB_CLIP unset: nothing is clipped"),
        (bug == "resume_repeats_epoch" and config.model == "line", "LAB_MODEL=line: its epoch is one batch"),
        (saves and config.checkpoint_every is None, "LAB_CHECKPOINT_EVERY unset: nothing is saved"),
        (saves and (config.checkpoint_every or 0) > config.steps, "LAB_CHECKPOINT_EVERY above LAB_STEPS: nothing is saved"),
        (bug == "lost_shard_tail" and not any(uneven(config)), f"these sizes: every layer divides evenly by WORLD_SIZE={ranks}"),
    ]  # fmt: skip
    return [f"LAB_BUG={bug} cannot show with {reason}" for applies, reason in reasons if applies][:1]


def uneven(config: Config) -> list[int]:
    """What is left over of each layer's parameters when the ranks have shared them."""
    return [sum(p.numel() for p in layer.parameters()) % config.world_size for layer in outline(config).layers]
