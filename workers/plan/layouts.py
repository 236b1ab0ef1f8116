"""How N ranks can be cut: t that share each layer, c that share each sample, p that share the layers, d replicas of that,
sharded by ZeRO or not.

Ranks of a tensor-parallel group are neighbours inside of one node, then come those that have other positions of a
sample, then the stages of a pipeline, then the replicas. Stages may hold unequal numbers of layers, as those of Llama 3
405B do (126 layers in 16 stages): the fullest sets the pace. Every replica gets the same number of microbatches, and
every rank along a sample two of 2c equal runs of its positions, so that all have as much to do (RUN_MODE=cp, zigzag).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from workers.plan.job import Job


@dataclass(frozen=True)
class Layout:
    """One way: t·p·d·c is the number of ranks; `stage` is ZeRO's, over the d·c ranks that hold the same."""

    tensor: int
    pipeline: int
    replicas: int
    stage: int
    context: int = 1

    @property
    def name(self) -> str:
        """tp 8 x cp 2 x pp 2 x zero1 4; a factor of 1 is left out, and ZeRO over cp alone is named without one."""
        data = sharing(self.stage)
        axes = {"tp": self.tensor, "cp": self.context, "pp": self.pipeline}
        parts = [f"{axis} {ranks}" for axis, ranks in axes.items() if ranks > 1]
        counted = [f"{data} {self.replicas}"] if self.replicas > 1 else [data] * (self.stage > 0)
        return " x ".join(parts + counted) if parts else data

    @property
    def holding(self) -> int:
        """Ranks that hold the same of the model, of other samples or of other positions: what ZeRO shards over."""
        return self.replicas * self.context

    @property
    def effort(self) -> tuple[bool, bool, bool, int]:
        """What it takes of a model's code, to be compared: sharding alone little, pipelines and cut layers much."""
        return (self.context > 1, *self.axes, self.stage)

    @property
    def megatron(self) -> bool:
        """Whether it is Megatron-LM's, plainly or with its distributed optimizer."""
        return self.tensor > 1 and self.stage < 2

    @property
    def axes(self) -> tuple[bool, bool]:
        """Whether there are pipelines, and cut layers."""
        return (self.pipeline > 1, self.tensor > 1)


def sharing(stage: int) -> str:
    """What the replicas do: all hold all of it, dp, or they shard it by a stage of ZeRO."""
    return f"zero{stage}" if stage else "dp"


# What is weighed, with each sample whole or cut by its positions: a name, whether layers are cut inside, whether they are cut between, and ZeRO's stage over the
# replicas. In a pipeline stages 2 and 3 are weighed too: a rank has a p-th of the layers, but sums and gathers them for
# p times as many microbatches, so that it sends as much as without a pipeline, and the price says so (zero_bytes).
KINDS = tuple(
    (axes + sharing(stage), tensor, pipeline, stage)
    for axes, tensor, pipeline in (
        ("", False, False),
        ("tp x ", True, False),
        ("pp x ", False, True),
        ("tp x pp x ", True, True),
    )
    for stage in range(4)
)


def layouts(job: Job, tensor: bool, pipeline: bool, stage: int, context: bool = False) -> Iterator[Layout]:
    """All ways of one kind that these sizes allow, with `context` those that cut samples; where one rank alone holds a part there is nothing to shard over."""
    for t in _divisors(math.gcd(job.node_gpus, job.shape.heads)) if tensor else [1]:
        for c in _runs(job, t) if context else [1]:
            for p in _divisors(job.gpus // (t * c)) if pipeline else [1]:
                replicas = job.gpus // (t * c * p)
                dealt = job.global_samples % (job.samples * replicas) == 0
                if p <= job.shape.layers and dealt and (stage == 0 or replicas * c > 1):
                    yield Layout(t, p, replicas, stage, c)


def _runs(job: Job, tensor: int) -> list[int]:
    """How many ranks can share a sample."""
    return [c for c in _divisors(job.gpus // tensor) if job.seq % (2 * c) == 0]


def impossible(job: Job, tensor: bool, pipeline: bool, stage: int) -> str:
    """Why there is no way of this kind; its name says which stage of ZeRO it is."""
    if job.gpus == 1:
        return "one GPU has nobody to share with"
    reasons = []
    if tensor:
        reasons.append(f"t divides the {job.node_gpus} GPUs of a node and the {job.shape.heads} heads")
    if pipeline:
        shared, alone = ("t·p", "p ") if tensor else ("p", "")
        reasons.append(f"{shared} divides the {job.gpus} GPUs, and {alone}is at most the {job.shape.layers} layers")
    if not job.grows:
        batch = f"batch of {job.global_samples} samples in microbatches of {job.samples}"
        reasons.append(f"the replicas share the {batch} equally")
    if stage > 0 and any(layouts(job, tensor, pipeline, 0)):
        reasons.append("ZeRO needs two replicas")
    return ", ".join(reasons)


def _divisors(number: int) -> list[int]:
    """From 2 on."""
    small = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    return sorted({*small, *(number // divisor for divisor in small)} - {1})
