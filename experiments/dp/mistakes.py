"""The classic mistakes of data parallelism, made on purpose by LAB_BUG: three deal the samples wrongly, six are in
the variants."""

import weakref
from functools import partial

from torch import Tensor, nn

from workers.config import Config
from workers.contract import Instead, Mistake, Needs
from workers.parallel.buckets import GradientBuckets, layout, place
from workers.strategies.replica import begin_apart
from workers.workload.data import Batches, permutation, shard_sizes
from workers.workload.model import outline

EVERY = ("naive", "flat", "bucketed", "ring", "ddp")


class MeansOfShards(Batches):
    """Each shard divides by its own count."""

    def share(self, num_samples: int, num_shards: int) -> float:
        """One over the shard's own terms, and over the shards."""
        return 1 / (num_samples * self.samples.terms * num_shards)


class NoSampler(Batches):
    """Every shard begins at the start of the batch."""

    def sample_ids(self, step: int, shard: int, num_shards: int) -> list[int]:
        """As many as are its own, the same for all."""
        return self.full_ids(step)[: len(super().sample_ids(step, shard, num_shards))]


class NoSetEpoch(Batches):
    """Deals the first epoch over again."""

    def sample_ids(self, step: int, shard: int, num_shards: int) -> list[int]:
        """Those of the same step of the first epoch."""
        return super().sample_ids(step % self.num_batches, shard, num_shards)


class StaleBuckets(GradientBuckets):
    """Forgets to begin anew."""

    def zero(self) -> None:
        """Leave the last step's sums where this step's gradients are added."""


class RacingBuckets(GradientBuckets):
    """Launches from a tensor hook, which autograd calls before it accumulates.

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


class LateBuckets(GradientBuckets):
    """Listens to no hook: the sums are right, and all of them wait for the end of the backward pass."""

    def _complete(self, index: int) -> None:
        """Leave it to `finish`."""


class HoardingBuckets(GradientBuckets):
    """Launches from hooks, but nothing before the last bucket is full."""

    def _complete(self, index: int) -> None:
        if self._armed:
            self._missing[index] -= 1
        if not any(self._missing):
            while self._next < len(self.buckets):
                self._launch_next()


# --- the settings that hide one ---


def equal_shards(config: Config) -> str:
    """Means of equal shards are the mean."""
    equal = len(set(shard_sizes(config.batch, config.world_size, uneven=True))) == 1
    return "as many samples on every rank: shards must differ in size, raise LAB_BATCH" if equal else ""


def equal_epochs(config: Config) -> str:
    """Where the second epoch begins as the first did, nothing is repeated by mistake."""
    if config.model == "line":
        return "LAB_MODEL=line: its batch is the whole data set"
    orders = (permutation(config.seed, epoch, 2 * config.batch) for epoch in (0, 1))
    first, second = (set(order[: config.batch].tolist()) for order in orders)
    return "these sizes: two epochs begin alike, change LAB_SEED or raise LAB_BATCH" if first == second else ""


def begins_at_zero(config: Config) -> str:
    """The line's weights are drawn by nobody."""
    return "LAB_MODEL=line: all its ranks begin at zero" if config.model == "line" else ""


def one_bucket(config: Config) -> str:
    """The only bucket is launched by the last gradient either way."""
    sizes = [parameter.numel() * parameter.itemsize for parameter in outline(config).parameters()]
    single = len(layout(sizes, config.bucket_mib * 2**20)) == 1
    return "LAB_BUCKET_MIB: all gradients are in one bucket, lower it" if single else ""


MISTAKES = {
    "means_of_shards": Mistake(
        "each rank divides by its own count: the mean of means weighs a small shard's samples more",
        "gradients",
        Instead(batches=MeansOfShards),
        Needs(unless=equal_shards),
    ),
    "no_sampler": Mistake(
        "every rank takes its samples from the start of the batch: some count N times, others never",
        "samples",
        Instead(batches=NoSampler),
    ),
    "no_set_epoch": Mistake(
        "every epoch repeats the order of the first one",
        "losses",
        Instead(batches=NoSetEpoch),
        Needs(ranks=1, unless=equal_epochs),
    ),
    "unwrapped_forward": Mistake(
        "the forward pass runs through the bare model, so that DDP never sums: replicas drift apart",
        "replicas",
        Instead(("ddp",), {"through": lambda model, _: model}),
    ),
    "stale_bucket": Mistake(
        "the buckets are not emptied between steps: each gradient has all former ones in it",
        "gradients",
        Instead(("flat", "bucketed", "ring"), {"buckets": StaleBuckets}),
        Needs(ranks=1),
    ),
    "hook_race": Mistake(
        "a bucket is launched by a hook that runs before the gradient is written to it",
        "gradients",
        Instead(("bucketed", "ring"), {"buckets": RacingBuckets}),
    ),
    "late_launch": Mistake(
        "all buckets are launched after the backward pass: every sum is right, and the link idles meanwhile",
        "launched early",
        Instead(("bucketed", "ring"), {"buckets": LateBuckets}),
        Needs(proof=False),
    ),
    "hoarded_buckets": Mistake(
        "no bucket is launched before the last one is full: within the backward pass still, and nothing is hidden",
        "launch order",
        Instead(("bucketed", "ring"), {"buckets": HoardingBuckets}),
        Needs(proof=False, unless=one_bucket),
    ),
    "no_broadcast": Mistake(
        "every rank begins from weights of its own",
        "replicas",
        Instead(EVERY, {"begin": begin_apart}),
        Needs(unless=begins_at_zero),
    ),
}
