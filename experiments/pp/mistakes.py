"""The classic mistakes of pipelines, made on purpose by LAB_BUG: what a loss counts, and what passes between stages."""

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor

from workers.config import Config
from workers.contract import Instead, Mistake, Needs
from workers.parallel.boundaries import Boundaries
from workers.parallel.schedules import Action
from workers.workload.data import shard_sizes

PIPELINED = ("gpipe", "1f1b", "interleaved", "torch_gpipe", "torch_1f1b")
ONE_STAGE = ("gpipe", "1f1b")  # ours, with a stage a rank


def undivided(share: float, num_samples: int, batch: int) -> float:
    """Weighs a loss as the mean over its own microbatch, as if there were no others."""
    return share * batch / num_samples


class SwappedBoundaries(Boundaries):
    """Stage 1 takes two neighbouring microbatches of one size for each other; of two it would be noticed."""

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


# --- the settings that hide one ---


def equal_neighbours(sizes: Sequence[int]) -> tuple[int, ...]:
    """The first two microbatches in a row that are of one size, or none."""
    return next(((index, index + 1) for index, (one, next_one) in enumerate(pairwise(sizes)) if one == next_one), ())


def none_to_swap(config: Config) -> str:
    """Microbatches of other sizes do not go unnoticed."""
    sizes = shard_sizes(config.batch, config.num_microbatches, uneven=True)
    hint = "these sizes: no two microbatches in a row are equal, change LAB_BATCH or LAB_MICROBATCHES"
    return "" if equal_neighbours(sizes) else hint


def one_in_flight(config: Config) -> str:
    """A rank that holds one activation at a time needs no more than one buffer."""
    chosen = set(config.variant or ONE_STAGE) & set(ONE_STAGE)
    alone = chosen == {"1f1b"} and config.world_size == 2
    return "1f1b on 2 ranks: its second rank holds one microbatch at a time" if alone else ""


MISTAKES = {
    "undivided_loss": Mistake(
        "each microbatch's mean loss is not divided by their number: gradients m times too large",
        "gradients",
        Instead(PIPELINED, {"weigh": undivided}),
        Needs(ranks=1, microbatches=2),
    ),
    "swapped_microbatches": Mistake(
        "the second stage takes two microbatches in the wrong order: their outputs meet each other's targets",
        "losses",
        Instead(ONE_STAGE, {"boundaries": SwappedBoundaries}),
        Needs(microbatches=2, unless=none_to_swap),
    ),
    "stale_activation": Mistake(
        "one receive buffer for all microbatches: an activation is overwritten before its backward pass",
        "gradients",
        Instead(ONE_STAGE, {"boundaries": StaleBoundaries}),
        Needs(microbatches=2, unless=one_in_flight),
    ),
}
