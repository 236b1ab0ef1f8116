"""Check overlap by the order of events in a step, not by time: which sums began during the backward pass.

A sum belongs to the gradients in the memory that it sends, and autograd reports when each gradient is ready, so the
checks do not rely on the buckets. Buckets must be in reverse order of registration, roughly that of the backward pass
(Li et al. 2020, section 3.2.3): this is checked by the number of bytes that wait. Below are the injected bugs that
these checks and the proof have to catch.
"""

import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import takewhile
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from distlab.contract import Claims, Measured, Mistakes, Mode, Needs
from distlab.lab.config import Config
from distlab.lab.lab import Lab
from distlab.lab.measure.event_order import Order
from distlab.lab.verify.run_all import measured
from distlab.lab.workload.data import Batches, permutation, shard_sizes
from distlab.lab.workload.model import Model, outline
from distlab.techniques.data_parallel.buckets import GradientBuckets, set_gradient_view
from distlab.techniques.data_parallel.strategy import Replica, draw_own_weights

from .predictions import VARIANTS, bucket_sizes

EARLY = ("bucketed", "ring", "plain")  # hooks send their first messages
SENDS = ("all_reduce", "send")


def early(order: Order) -> int:
    """Return the number of sums that began before the end of the backward pass."""
    over = max(order.where("end", "backward"), default=-1)
    return sum(1 for place in order.launches(*SENDS) if place < over)


def waiting(order: Order, sizes: Mapping[str, int]) -> int:
    """Return the most bytes that waited while another gradient was computed, though their sum missed nothing: gradients
    of the last registered parameters, all computed by then. `sizes` are in order of registration. With several
    microbatches, the last one's gradients count."""
    last = max(order.where("begin", "backward"), default=0)
    begun = {place: sum(sizes[name] for name in names) for place, names in order.launches(*SENDS).items()}
    arrived: set[str] = set()
    most = launched = 0
    for place, event in enumerate(order.events):
        launched += begun.get(place, 0)
        if event.what == "gradient" and place >= last:
            complete = sum(sizes[name] for name in takewhile(arrived.__contains__, reversed(list(sizes))))
            most = max(most, complete - launched)
            arrived.add(event.label)
    return most


def gradient_sizes(config: Config) -> dict[str, int]:
    """Return the bytes of each gradient by its name in an `Order`, as registered; a tied one once."""
    itemsize, found = config.itemsize, dict[nn.Parameter, tuple[str, int]]()
    for index, layer in enumerate(outline(config).layers):
        for name, parameter in layer.named_parameters():
            found.setdefault(parameter, (f"{index}.{name}", parameter.numel() * itemsize))
    return dict(found.values())


FEW_NUMBERS = "with fewer numbers in a bucket than ranks, some ranks send nothing at first"
BY_HOST = "over gloo a GPU's data is sent from host memory, where no gradient is"


def check_overlap(lab: Lab, measured: Mapping[str, Measured]) -> None:
    """Check when each variant's sums began: from hooks during the backward pass, or after it."""
    sizes, bucket_bytes = bucket_sizes(lab.config), lab.config.bucket_mib * 2**20
    for name, seen in measured.items():
        if name == "ddp":
            over = max(seen.order.where("end", "backward"), default=0)
            began = sum(1 for place in seen.order.where("call", "all_reduce") if place < over)
            lab.compare(
                "launched early", len(sizes) + 1, began, "buckets", variant=name, formula="all buckets",
                shown="it is PyTorch's own",
            )  # fmt: skip
            continue
        silent = name == "ring" and lab.world_size == 1  # no other rank to send to
        predicted = len(sizes) if name in EARLY and not silent else 0
        few, host = name == "ring" and min(sizes) < lab.world_size, name == "ring" and lab.config.gloo_on_gpus
        shows = not (few or host)
        lab.compare(
            "launched early", predicted, early(seen.order), "buckets", variant=name,
            formula="all buckets" if name in EARLY else "none",
            shown=(BY_HOST if host else FEW_NUMBERS) * (not shows),
        )  # fmt: skip
        if name in EARLY and shows and not silent:
            launches = seen.order.launches(*SENDS)
            wrong = seen.order.untimely(launches)
            detail = (
                f"{len(wrong)} of {len(launches)} buckets launched before their last gradient, or not right after it"
            )
            lab.check("launch order", len(wrong), 0, name, detail)
            most = waiting(seen.order, gradient_sizes(lab.config))
            detail = "bytes of complete gradients that waited for a launch, beyond one bucket"
            lab.check("waiting gradients", max(0.0, most - bucket_bytes), 0, name, detail)


def claims(mode: Mode, config: Config) -> Sequence[Claims]:
    """Return the checks of all variants by hand: bytes, predicted calls, and when sums begin."""
    orders = "tests/experiments/test_orders.py::"
    return (
        *measured(mode, config),
        Claims(("samples",), one=True, when=config.proof),
        Claims(("replicas",), (*mode.by_hand, *mode.by_torch), when=config.proof),
        Claims(("called bytes", "wire bytes", "rest bytes", "launched early"), mode.by_hand),
        Claims(("peak bytes",), mode.by_hand, fails_in=f"{orders}test_dp_retained_graphs_fail_the_peak"),
        Claims(("calls",), VARIANTS[:3]),
        Claims(("launch order",), ("bucketed",)),  # also ring's, except for buckets with fewer numbers than ranks
        Claims(("waiting gradients",), (), fails_in=f"{orders}test_dp_bytes_waiting_for_the_first_layer_are_counted"),
    )


# Classic bugs of data parallelism, injected by LAB_BUG: three distribute samples wrongly, six are in the variants.

mistake = Mistakes()


# --- settings that hide a bug ---


def equal_shards(config: Config) -> str:
    """The mean of equal shards' means is the correct mean."""
    equal = len(set(shard_sizes(config.batch, config.world_size, uneven=True))) == 1
    return "all ranks have equally many samples: shards must differ in size, raise LAB_BATCH" if equal else ""


def equal_epochs(config: Config) -> str:
    """If two epochs begin equally, the bug repeats nothing."""
    if config.model == "line":
        return "LAB_MODEL=line: its batch is the whole data set"
    orders = (permutation(config.seed, epoch, 2 * config.batch) for epoch in (0, 1))
    first, second = (set(order[: config.batch].tolist()) for order in orders)
    return (
        "these sizes: two epochs begin with the same samples, change LAB_SEED or raise LAB_BATCH"
        if first == second
        else ""
    )


def begins_at_zero(config: Config) -> str:
    """All ranks begin with the line's weights at zero."""
    return "LAB_MODEL=line: all ranks begin with weights of zero" if config.model == "line" else ""


def one_bucket(config: Config) -> str:
    """The last gradient launches the only bucket in any case."""
    return "LAB_BUCKET_MIB: all gradients fit in one bucket, lower it" if len(bucket_sizes(config)) == 1 else ""


# --- the bugs ---


@mistake("means_of_shards", check="gradients", part="batches", needs=Needs(unless=equal_shards))
class MeansOfShards(Batches):
    """Each rank divides by its own count: a mean of means gives a small shard's samples too much weight."""

    def share(self, num_samples: int, num_shards: int) -> float:
        """Return 1 / (terms of the shard x number of shards)."""
        return 1 / (num_samples * self.samples.terms * num_shards)


@mistake("no_sampler", check="samples", part="batches")
class NoSampler(Batches):
    """Every rank takes its samples from the start of the batch: some count N times, others never."""

    def sample_ids(self, step: int, shard: int, num_shards: int) -> list[int]:
        """Return as many samples as this rank's own, but the same for all ranks."""
        return self.full_ids(step)[: len(super().sample_ids(step, shard, num_shards))]


@mistake("no_set_epoch", check="losses", part="batches", needs=Needs(ranks=1, unless=equal_epochs))
class NoSetEpoch(Batches):
    """Every epoch repeats the order of the first one."""

    def sample_ids(self, step: int, shard: int, num_shards: int) -> list[int]:
        """Return the samples of the same step in the first epoch."""
        return super().sample_ids(step % self.num_batches, shard, num_shards)


@mistake("unwrapped_forward", check="replicas", part="Replica", of=("ddp",))
def unwrapped(*args: Any, forward: nn.Module, scale: float) -> Replica:  # noqa: ARG001
    """The forward pass calls the bare model, so DDP never sums: replicas drift apart."""
    return Replica(*args, scale=scale)


@mistake(
    "stale_bucket", check="gradients", part="GradientBuckets", of=("flat", "bucketed", "ring"), needs=Needs(ranks=1)
)
class StaleBuckets(GradientBuckets):
    """The buckets are not emptied between steps: each gradient includes all earlier ones."""

    def zero(self) -> None:
        """Keep the last step's sums, to which this step's gradients are added."""


@mistake("hook_race", check="gradients", part="GradientBuckets", of=("bucketed", "ring"))
class RacingBuckets(GradientBuckets):
    """A bucket is launched by a hook that runs before the gradient is written to it.

    It waits for the sum at once, so the race is always lost: each bucket's last gradient is this rank's only.
    """

    def _watch(self, parameter: nn.Parameter, view: Tensor, index: int) -> None:
        buckets = weakref.proxy(self)
        parameter.register_hook(lambda _: buckets._complete(index))
        parameter.register_post_accumulate_grad_hook(partial(set_gradient_view, view=view))

    def _launch_next(self) -> None:
        super()._launch_next()
        handle = self.buckets[self._next - 1].handle
        if handle is not None:
            handle.wait()


@mistake(
    "late_launch", check="launched early", part="GradientBuckets", of=("bucketed", "ring"), needs=Needs(proof=False)
)
class LateBuckets(GradientBuckets):
    """All buckets are launched after the backward pass: every sum is right, and the link idles meanwhile."""

    def _complete(self, index: int) -> None:
        """Leave it to `finish`."""


@mistake(
    "hoarded_buckets",
    check="launch order",
    part="GradientBuckets",
    of=("bucketed", "ring"),
    needs=Needs(proof=False, unless=one_bucket),
)
class HoardingBuckets(GradientBuckets):
    """No bucket is launched before the last one is full: still in the backward pass, but nothing overlaps."""

    def _complete(self, index: int) -> None:
        if self._launches:
            self.buckets[index].missing -= 1
        if not any(bucket.missing for bucket in self.buckets):
            while self._next < len(self.buckets):
                self._launch_next()


@mistake("no_broadcast", check="replicas", part="draw_and_broadcast", of=VARIANTS, needs=Needs(unless=begins_at_zero))
def no_broadcast(model: Model, group: dist.ProcessGroup, config: Config) -> None:
    """Every rank begins with different weights."""
    draw_own_weights(model, group, config)
