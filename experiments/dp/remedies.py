"""The fourth classic bug is no wrong line but a slow link: eight ranks that are three times as fast as one.

A step takes T, of which the passes and the update take C; the rest is communication that nothing hides.

  utilisation = C / T                 the share of a step in which ranks compute
  speedup     = N x C / T             over one rank, which sends nothing: 8 ranks at 40 % are 3.2 ranks

C is the same step with nothing sent, on all ranks at once, so that ranks which share cores are slowed alike in both. Four remedies,
each measured beside the illness: more samples a rank (4 times, in one pass) or more passes before the sum (accumulation, 4
microbatches), which both compute 4 times as much for the same bytes and make the global batch 4 times as large; 16 bits a gradient
on the wire, which halves the bytes and rounds the sum; and a faster link. Of the last the limit is shown, a link without end, by
leaving the sum out: those replicas do not train together, their time alone is of use.
"""

from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from experiments.dp.stopwatch import MIB, medians_s, replica, send_nothing, step
from workers.lab import Lab
from workers.parallel.buckets import AllReduce
from workers.workload.data import Batches, Microbatch

MORE = 4  # times the samples of a step
COLUMNS = ["remedy", "samples a step", "ms a step", "communication %", "utilisation %", "speedup", "samples a second"]


def remedies(lab: Lab) -> None:
    """Measure the illness and its remedies side by side; all ranks enter together."""
    lab.at(0, "the remedies")
    batches = lab.batches(getattr(torch, lab.config.dtype))
    usual = batches.dealt(0, lab.rank, lab.world_size)
    loads = {"usual": usual, "larger": larger(lab, batches), "accumulated": accumulated(lab, batches)}
    sent, kept = (replica(lab, lab.config.bucket_mib * MIB, all_reduce) for all_reduce in (None, send_nothing))
    halved = replica(lab, lab.config.bucket_mib * MIB, in_bfloat16(lab.group))
    seconds = medians_s(
        lab,
        {name: partial(step, sent, load) for name, load in loads.items()}
        | {f"{name} alone": partial(step, kept, load) for name, load in loads.items()}
        | {"halved": partial(step, halved, usual)},
    )
    samples = sum(lab.exchange.everyone("samples", sum(len(each.inputs) for each in usual)))
    rows = [
        row(lab, "as it is", samples, seconds["usual"], seconds["usual alone"]),
        row(lab, f"{MORE} times the samples a rank", MORE * samples, seconds["larger"], seconds["larger alone"]),
        row(lab, f"{MORE} microbatches accumulated", MORE * samples, seconds["accumulated"], seconds["accumulated alone"]),
        row(lab, "16-bit gradients (bfloat16)", samples, seconds["halved"], seconds["usual alone"]),
        row(lab, "a link without end (nothing sent)", samples, seconds["usual alone"], seconds["usual alone"]),
    ]  # fmt: skip
    lab.table("bound by communication: what helps, on this link", COLUMNS, rows)
    lab.say(
        f"{lab.world_size} ranks are {rows[0][5]:.3g} times as fast as one, {rows[0][4]} % of a step is compute; "
        f"accumulation makes that {rows[2][5]:.3g} times, 16 bits {rows[3][5]:.3g} times",
        "remedies",
    )


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


def in_bfloat16(group: dist.ProcessGroup) -> AllReduce:
    """An all_reduce that sends a bucket in bfloat16: 8 bits of mantissa, and float32's range, so that nothing overflows."""

    def all_reduce(bucket: Tensor) -> Widening:
        half = bucket.to(torch.bfloat16)
        work = dist.all_reduce(half, group=group, async_op=True)
        assert work is not None
        return Widening(work, half, bucket)

    return all_reduce


class Widening(NamedTuple):
    """A sum on its way in 16 bits, and where it goes."""

    work: dist.Work
    half: Tensor
    bucket: Tensor

    def wait(self) -> None:
        """Until the sum is in the bucket."""
        self.work.wait()
        self.bucket.copy_(self.half)
