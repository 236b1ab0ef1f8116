"""Bucket sizes on a slow link: what a bucket costs, what overlap hides, and where one stops paying for the other.

Small buckets leave early, while most of the backward pass is still to come, but each pays a latency; one bucket for all
pays one latency and leaves when nothing is left to hide it behind. For each size from 0 (a bucket a parameter) to 64
MiB (one for all, in a small model far before) four things are timed in turns:

  overlapped   a step whose buckets leave from hooks, during the backward pass
  after        the same step, all buckets leaving behind the backward pass
  sending      the buckets alone, with no pass
  nothing      the passes and the update alone, with nothing sent

  hidden = (after - overlapped) / sending: the share of the communication that took no time of its own. More than the
  backward pass' own time cannot be hidden, so on a slow enough link it is far from 100 % whatever the buckets are.
"""

import statistics
from collections.abc import Callable, Mapping
from functools import partial

import torch

from distlab.collectives.costs import slowest_of
from distlab.data_parallel.buckets import AllReduce, GradientBuckets, all_reduce_of_buckets, layout, swaps_buckets
from distlab.data_parallel.strategy import Replica
from distlab.lab import Lab
from distlab.workload.data import Microbatch


def tell(lab: Lab) -> None:
    """Say so where it is not the all_reduce that DDP takes."""
    if swaps_buckets(lab.group, lab.config) and lab.wants("bucketed"):
        lab.say(
            "bucketed swaps each bucket with the other rank in one round; ddp's all_reduce takes two for as many bytes",
            "sum",
        )


# How long steps take on a slow link: the slowest rank's seconds, in rounds in which all candidates take turns.

MIB = 2**20
ROUNDS = 3  # the median drops the first one, which warms up; on a slow link a step is long, and like the next


def replica(lab: Lab, bucket_bytes: float, all_reduce: AllReduce | None = None) -> Replica:
    """A replica as `bucketed` has it, with buckets of that size, summed as there or by another all_reduce."""
    model = lab.model(getattr(torch, lab.config.dtype))
    summed = all_reduce or all_reduce_of_buckets(lab.group, lab.config)
    return Replica(model, lab.config, GradientBuckets(model.parameters(), lab.group, bucket_bytes, all_reduce=summed))


def step(strategy: Replica, microbatches: list[Microbatch]) -> None:
    strategy.backward(microbatches)
    strategy.update()


def send_nothing(bucket: torch.Tensor) -> None:
    """An all_reduce over a link without end, as far as time goes: every rank keeps its own gradients."""


def medians_s(lab: Lab, calls: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """Seconds of each call: of the slowest rank, and of the median round."""
    rounds = [[lab.seconds(call) for call in calls.values()] for _ in range(ROUNDS)]
    everyone = lab.exchange.everyone("rounds", rounds)  # [rank][round][call]
    slowest = [slowest_of(of_round) for of_round in zip(*everyone, strict=True)]
    return dict(zip(calls, map(statistics.median, zip(*slowest, strict=True)), strict=True))


SIZES_MIB = (0, 0.25, 1, 4, 16, 64)
CURVES = {"overlapped": 2, "after": 3, "nothing sent": 5}  # of the chart, by their columns
COLUMNS = ["MiB", "buckets", "overlapped ms", "after ms", "sending ms", "nothing ms", "hidden %"]


def sweep(lab: Lab) -> None:
    """Time all bucket sizes, and say which is best and why; all ranks enter together."""
    model = lab.model(getattr(torch, lab.config.dtype))
    parameters = [parameter.numel() * parameter.element_size() for parameter in model.parameters()]
    total = sum(parameters)
    rows = []
    sizes = distinct(parameters)
    with lab.work.of(len(sizes), "bucket sizes"):
        for mib, buckets in sizes:
            lab.at(0, f"the sweep at {mib:g} MiB")
            times = price(lab, mib * MIB)
            hidden = 100 * (times["after"] - times["overlapped"]) / times["sending"]
            rows.append([mib, buckets, *(1e3 * seconds for seconds in times.values()), hidden])
            lab.work.advance()
    shown = [
        [f"{row[0]:g}" if row is not rows[-1] else f"{row[0]:g} to 64", row[1], *(round(value, 1) for value in row[2:])]
        for row in rows
    ]
    lab.table("a step by the size of a bucket, on this link", COLUMNS, shown)
    mean_mib = [total / MIB / row[1] for row in rows]
    lab.chart(
        "A step by the size of a bucket", "MiB a bucket, on average", "ms a step",
        {name: [mean_mib, [row[place] for row in rows]] for name, place in CURVES.items()},
        log_x=True,
    )  # fmt: skip
    lab.say(verdict(rows), "buckets")


def distinct(sizes: list[int]) -> list[tuple[float, int]]:
    """Bucket sizes in MiB that lay the parameters out differently, and the number of buckets of each."""
    found: list[tuple[float, int]] = []
    before = None
    for mib in SIZES_MIB:
        buckets = layout(sizes, mib * MIB)
        if buckets != before:
            found.append((mib, len(buckets)))
        before = buckets
    return found


def price(lab: Lab, bucket_bytes: float) -> dict[str, float]:
    """Seconds of the four things at one bucket size."""
    microbatches = lab.batches(getattr(torch, lab.config.dtype)).dealt(0, lab.rank, lab.world_size)
    sent, kept = replica(lab, bucket_bytes), replica(lab, bucket_bytes, send_nothing)

    def stepped(*, overlap: bool) -> None:
        buckets_of(sent).overlap = overlap
        step(sent, microbatches)

    def send() -> None:
        sent.gradients.zero()
        sent.gradients.finish()

    return medians_s(
        lab,
        {
            "overlapped": partial(stepped, overlap=True),
            "after": partial(stepped, overlap=False),
            "sending": send,
            "nothing": partial(step, kept, microbatches),
        },
    )


def buckets_of(strategy: Replica) -> GradientBuckets:
    assert isinstance(strategy.gradients, GradientBuckets)
    return strategy.gradients


def verdict(rows: list[list[float]]) -> str:
    best = min(rows, key=lambda row: row[2])
    one, all_at_once = rows[0], rows[-1]
    others = [
        f"{name} costs {100 * (row[2] / best[2] - 1):.0f} % more"
        for name, row in ((f"a bucket a parameter ({one[1]:.0f} calls)", one), ("one bucket for all", all_at_once))
        if row is not best
    ]
    return "; ".join(
        [
            (
                f"best with {best[1]:.0f} of {best[0]:g} MiB: {best[2]:.0f} ms a step, {round(best[6])} % of sending"
                " hidden"
            ),
            *others,
        ]
    )
