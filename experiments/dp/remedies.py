"""The fourth classic bug is no wrong line but a slow link: eight ranks that are three times as fast as one.

A step takes T, of which the passes and the update take C; the rest is communication that nothing hides.

  utilisation = C / T                 the share of a step in which ranks compute
  speedup     = N x C / T             over one rank, which sends nothing: 8 ranks at 40 % are 3.2 ranks

C is the same step with nothing sent, on all ranks at once, so that ranks which share cores are slowed alike in both.
Four remedies, each measured beside the illness: more samples a rank (4 times, in one pass) or more passes before the
sum (accumulation, 4 microbatches), which both compute 4 times as much for the same bytes and make the global batch 4
times as large; 16 bits a gradient on the wire, which halves the bytes and rounds the sum; and a link 4 times as fast,
where the run's own has a rate (LAB_NET_RATE): the kernel keeps a faster lane beside it, and a second group of the same
ranks takes that one (workers/rank/fast_lane.py). Below stands the limit of the last, a link without end, by leaving the
sum out: those replicas do not train together, their time alone is of use.
"""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from experiments.dp.stopwatch import MIB, medians_s, replica, send_nothing, step
from experiments.dp.summing import summing
from workers.lab import Lab
from workers.parallel.buckets import AllReduce
from workers.parallel.casting import Cast
from workers.rank.fast_lane import FASTER, fast_lane, measure_lane
from workers.workload.data import Batches, Microbatch

MORE = 4  # times the samples of a step
COLUMNS = ["remedy", "samples a step", "ms a step", "communication %", "utilisation %", "speedup", "samples a second"]


def remedies(lab: Lab) -> None:
    """Measure the illness and its remedies side by side; all ranks enter together."""
    lab.at(0, "the remedies")
    with fast_lane(lab) as lane:
        rows = measured(lab, lane if isinstance(lane, dist.ProcessGroup) else None)
        lab.table("bound by communication: what helps, on this link", COLUMNS, rows)
        helps = [f"accumulation makes that {rows[2][5]:.3g} times", f"16 bits {rows[3][5]:.3g} times"]
        if isinstance(lane, dist.ProcessGroup):
            helps.append(f"a link {FASTER} times as fast ({measure_lane(lab, lane)}) {rows[4][5]:.3g} times")
        lab.say(
            f"{lab.world_size} ranks are {rows[0][5]:.3g} times as fast as one, {rows[0][4]} % of a step is compute; "
            + ", ".join(helps),
            "remedies",
        )
        if isinstance(lane, str):
            lab.say(f"a link {FASTER} times as fast is not measured: {lane}", "remedies")


def measured(lab: Lab, lane: dist.ProcessGroup | None) -> list[list[Any]]:
    """The table's lines: the step as it is, with each remedy, and with nothing sent; a faster link where there is a
    `lane`."""
    batches = lab.batches(getattr(torch, lab.config.dtype))
    usual = batches.dealt(0, lab.rank, lab.world_size)
    loads = {"usual": usual, "larger": larger(lab, batches), "accumulated": accumulated(lab, batches)}
    bucket_bytes = lab.config.bucket_mib * MIB
    sent, kept = (replica(lab, bucket_bytes, all_reduce) for all_reduce in (None, send_nothing))
    others: dict[str, AllReduce] = {"halved": Halved(lab)}
    if lane is not None:
        others["faster"] = summing(lane, lab.config)
    seconds = medians_s(
        lab,
        {name: partial(step, sent, load) for name, load in loads.items()}
        | {f"{name} alone": partial(step, kept, load) for name, load in loads.items()}
        | {name: partial(step, replica(lab, bucket_bytes, other), usual) for name, other in others.items()},
    )
    samples = sum(lab.exchange.everyone("samples", sum(len(each.inputs) for each in usual)))
    lines = {
        "as it is": (1, "usual", "usual alone"),
        f"{MORE} times the samples a rank": (MORE, "larger", "larger alone"),
        f"{MORE} microbatches accumulated": (MORE, "accumulated", "accumulated alone"),
        "16-bit gradients (bfloat16)": (1, "halved", "usual alone"),
        f"a link {FASTER} times as fast": (1, "faster", "usual alone"),
        "a link without end (nothing sent)": (1, "usual alone", "usual alone"),
    }
    return [
        row(lab, name, times * samples, seconds[whole], seconds[alone])
        for name, (times, whole, alone) in lines.items()
        if whole in seconds
    ]


class Halved(Cast):
    """16 bits a gradient on the wire, and summed there as `bucketed` sums."""

    def __init__(self, lab: Lab) -> None:
        super().__init__(lab.group, torch.bfloat16, feedback=False)
        self.summed = summing(lab.group, lab.config)

    def all_reduce(self, message: Tensor) -> tuple[Any, Tensor]:
        total = message.clone()
        return self.summed(total), total


def row(lab: Lab, name: str, samples: int, step_s: float, alone_s: float) -> list[str | int | float]:
    """One line of the table, from the seconds of a step and of the same step with nothing sent."""
    used = min(1.0, alone_s / step_s)
    return [
        name, samples, round(1e3 * step_s, 1), round(100 * (1 - used)), round(100 * used), round(lab.world_size * used, 2),
        round(samples / step_s, 1),
    ]  # fmt: skip


def accumulated(lab: Lab, batches: Batches) -> list[Microbatch]:
    """This rank's microbatches of MORE steps, as one step."""
    return [
        microbatch._replace(share=microbatch.share / MORE)
        for index in range(MORE)
        for microbatch in batches.dealt(index, lab.rank, lab.world_size)
    ]


def larger(lab: Lab, batches: Batches) -> list[Microbatch]:
    """The same samples in as many microbatches as a usual step has, each MORE times as large."""
    steps = [batches.dealt(index, lab.rank, lab.world_size) for index in range(MORE)]
    return [
        Microbatch(
            torch.cat([each.inputs for each in parts]),
            torch.cat([each.targets for each in parts]),
            parts[0].share / MORE,
        )
        for parts in zip(*steps, strict=True)
    ]
