"""The classic mistakes of pipelines, made on purpose by LAB_BUG, each with the check that has to see it.

A mistake that cannot show in the run that was asked for is refused: a check that cannot fail would only look like one
that held.
"""

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor

from workers.config import Config
from workers.lab import Bug
from workers.parallel.boundaries import Boundaries
from workers.parallel.schedules import Action
from workers.workload.data import Microbatch, global_batch, shard_sizes

BUGS = {
    "undivided_loss": Bug(
        "each microbatch's mean loss is not divided by their number: gradients m times too large", "gradients"
    ),
    "swapped_microbatches": Bug(
        "the second stage takes two microbatches in the wrong order: their outputs meet each other's targets", "losses"
    ),
    "stale_activation": Bug(
        "one receive buffer for all microbatches: an activation is overwritten before its backward pass", "gradients"
    ),
}

SEEN_IN = {  # the variants that can make the mistake
    "undivided_loss": ("gpipe", "1f1b", "interleaved", "torch_gpipe", "torch_1f1b"),
    "swapped_microbatches": ("gpipe", "1f1b"),
    "stale_activation": ("gpipe", "1f1b"),
}


class SwappedBoundaries(Boundaries):
    """Stage 1 takes two neighbouring microbatches of equal size for each other; of other sizes it would not go unnoticed."""

    def tag(self, action: Action) -> int:
        """The other one's, where stage 1 receives."""
        pair = equal_neighbours(self.sizes)
        if action.kind == "forward" and action.stage == 1 == self.peers.rank and action.microbatch in pair:
            action = action._replace(microbatch=sum(pair) - action.microbatch)
        return super().tag(action)


class StaleBoundaries(Boundaries):
    """Copies every activation that a stage receives into one buffer."""

    def take(self, action: Action) -> Tensor:
        """A view of the buffer; `.data`, since autograd's count of changes would give the mistake away."""
        received = super().take(action)
        if action.kind == "backward":
            return received
        if not hasattr(self, "shared"):
            self.shared = received.new_empty(max(self.sizes), *received.shape[1:])
        self.shared.data[: len(received)].copy_(received)
        return self.shared[: len(received)].detach()


def boundaries_of(config: Config) -> type[Boundaries]:
    """The boundaries that LAB_BUG asks for."""
    return {"swapped_microbatches": SwappedBoundaries, "stale_activation": StaleBoundaries}.get(
        config.bug or "", Boundaries
    )


def undivided(microbatches: list[Microbatch]) -> list[Microbatch]:
    """Each loss weighed as the mean over its own microbatch, as if there were no others."""
    total = sum(len(microbatch.inputs) for microbatch in microbatches)
    return [microbatch._replace(share=microbatch.share * total / len(microbatch.inputs)) for microbatch in microbatches]


def equal_neighbours(sizes: Sequence[int]) -> tuple[int, ...]:
    """The first two microbatches in a row that are of one size, or none."""
    return next(((index, index + 1) for index, (one, next_one) in enumerate(pairwise(sizes)) if one == next_one), ())


def invisible(config: Config) -> list[str]:
    """A sentence if no check could see LAB_BUG with these settings."""
    bug, ranks = config.bug, config.world_size
    if bug is None or bug not in BUGS:
        return []
    makers = SEEN_IN[bug]
    chosen = set(config.variant or makers) & set(makers)
    sizes = shard_sizes(global_batch(config), config.num_microbatches, uneven=True)
    reasons = [
        (not config.proof, "LAB_PROOF=0: nothing is compared"),
        (config.num_microbatches == 1, "LAB_MICROBATCHES=1: it takes two microbatches"),
        (ranks == 1 and bug != "undivided_loss", "WORLD_SIZE=1: it takes two ranks"),
        (not chosen, f"these variants: it takes {' or '.join(makers)}"),
        (
            bug == "swapped_microbatches" and not equal_neighbours(sizes),
            "these sizes: no two microbatches in a row are equal, change LAB_BATCH or LAB_MICROBATCHES",
        ),
        (
            bug == "stale_activation" and chosen == {"1f1b"} and ranks == 2,
            "1f1b on 2 ranks: its second rank holds one microbatch at a time",
        ),
    ]
    return [f"LAB_BUG={bug} cannot show with {reason}" for applies, reason in reasons if applies][:1]
