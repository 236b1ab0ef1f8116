"""The classic mistakes of data parallelism, made on purpose by LAB_BUG, each with the check that has to see it.

Three act on the data (in `workers.workload.data`), the others here. A mistake that cannot show in the run that was
asked for is refused: a check that cannot fail would only look like one that held.
"""

import weakref
from functools import partial

from torch import Tensor, nn

from workers.config import Config
from workers.lab import Bug
from workers.parallel.buckets import GradientBuckets, place
from workers.workload.data import faults as data_faults
from workers.workload.data import global_batch, permutation, shard_sizes

BUGS = {
    "means_of_shards": Bug(
        "each rank divides by its own count: the mean of means weighs a small shard's samples more", "gradients"
    ),
    "no_sampler": Bug(
        "every rank takes its samples from the start of the batch: some count N times, others never", "samples"
    ),
    "no_set_epoch": Bug("every epoch repeats the order of the first one", "losses"),
    "unwrapped_forward": Bug(
        "the forward pass runs through the bare model, so that DDP never sums: replicas drift apart", "replicas"
    ),
    "stale_bucket": Bug(
        "the buckets are not emptied between steps: each gradient has all former ones in it", "gradients"
    ),
    "hook_race": Bug("a bucket is launched by a hook that runs before the gradient is written to it", "gradients"),
    "no_broadcast": Bug("every rank begins from weights of its own", "replicas"),
}

SEEN_IN = {  # the variants that can make the mistake, where not all can
    "unwrapped_forward": ("ddp",),
    "stale_bucket": ("flat", "bucketed", "ring"),
    "hook_race": ("bucketed", "ring"),
}


class StaleBuckets(GradientBuckets):
    """Forgets to begin anew."""

    def zero(self) -> None:
        """Leave the last step's sums where this step's gradients are added."""


class RacingBuckets(GradientBuckets):
    """Launches from a tensor hook, which autograd calls before it accumulates (W16).

    It waits for the sum at once, so that the race is always lost: each bucket's last gradient stays this rank's own.
    """

    def _watch(self, parameter: nn.Parameter, view: Tensor, index: int) -> None:
        buckets = weakref.proxy(self)
        parameter.register_hook(lambda _: buckets._complete(index))
        parameter.register_post_accumulate_grad_hook(partial(place, view=view))

    def _launch_next(self) -> None:
        super()._launch_next()
        if self._handles[-1] is not None:
            self._handles[-1].wait()


def buckets_of(config: Config) -> type[GradientBuckets]:
    """The buckets that LAB_BUG asks for."""
    return {"stale_bucket": StaleBuckets, "hook_race": RacingBuckets}.get(config.bug or "", GradientBuckets)


def invisible(config: Config) -> list[str]:
    """A sentence if no check could see LAB_BUG with these settings."""
    bug, ranks = config.bug, config.world_size
    if bug is None or bug not in BUGS or data_faults(config, ranks):
        return []
    alone = ranks == 1 and bug not in ("no_set_epoch", "stale_bucket")
    makers = SEEN_IN.get(bug, config.variant)
    equal = len(set(shard_sizes(global_batch(config), ranks, uneven=True))) == 1
    is_line = config.model == "line"
    reasons = [
        (not config.proof, "LAB_PROOF=0: nothing is compared"),
        (alone, "WORLD_SIZE=1: it takes two ranks"),
        (
            bool(config.variant) and not set(config.variant) & set(makers),
            f"these variants: it takes {' or '.join(makers)}",
        ),
        (
            bug == "means_of_shards" and equal,
            "as many samples on every rank: shards must differ in size, raise LAB_BATCH",
        ),
        (bug == "no_broadcast" and is_line, "LAB_MODEL=line: all its ranks begin at zero"),
        (bug == "no_set_epoch" and is_line, "LAB_MODEL=line: its batch is the whole data set"),
        (
            bug == "no_set_epoch" and _same_epochs(config),
            "these sizes: two epochs begin alike, change LAB_SEED or raise LAB_BATCH",
        ),
    ]
    return [f"LAB_BUG={bug} cannot show with {reason}" for applies, reason in reasons if applies][:1]


def _same_epochs(config: Config) -> bool:
    batch = global_batch(config)
    first, second = (set(permutation(config.seed, epoch, 2 * batch)[:batch].tolist()) for epoch in (0, 1))
    return first == second
