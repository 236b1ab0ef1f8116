"""Layouts of N ranks: t ranks split each layer, c each sample, p the layers, d replicas of that, sharded by ZeRO or
not; a mixture's experts are distributed over e of the t·d·c ranks, each split over `expert_tensor` of the t ranks
(Megatron-LM's ETP, by default 1).

Neighbours are ranks of a tensor-parallel group, inside of one node, then those with other positions of a sample, then
the replicas, then the stages of a pipeline, in Megatron-LM's order. Stages may have unequal numbers of
layers, as those of Llama 3 405B do (126 layers in 16 stages): the fullest sets the pace. Every replica gets the same
number of microbatches, and every rank of a sample two of 2c equal runs of its positions, to balance the work
(RUN_MODE=cp, zigzag).
"""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from distlab.tools.plan.job import Job


@dataclass(frozen=True)
class Layout:
    """A layout: t·p·d·c ranks; `stage` is ZeRO's, over the d·c ranks with equal parameters. Each rank of a
    pipeline has `chunks` stages; `expert` groups of `expert_tensor` ranks of the t·d·c share the experts."""

    tensor: int
    pipeline: int
    replicas: int
    stage: int
    context: int = 1
    expert: int = 1
    chunks: int = 1
    expert_tensor: int = 1

    @property
    def name(self) -> str:
        """Return a name like tp 8 x cp 2 x pp 2 x zero1 4; factors of 1 are left out, ZeRO over cp alone has none."""
        data = sharing(self.stage)
        axes = {"tp": self.tensor, "cp": self.context, "ep": self.expert, "etp": self.expert_tensor, "pp": self.pipeline}  # fmt: skip
        parts = [f"{axis} {ranks}" for axis, ranks in axes.items() if ranks > 1]
        counted = [f"{data} {self.replicas}"] if self.replicas > 1 else [data] * (self.stage > 0)
        chunked = [f"{self.chunks} chunks"] if self.chunks > 1 else []
        return " x ".join(parts + counted + chunked) if parts else data

    @property
    def gpus(self) -> int:
        return self.tensor * self.pipeline * self.replicas * self.context

    @property
    def holding(self) -> int:
        """Count the ranks with equal parameters, for other samples or positions: ZeRO shards over these."""
        return self.replicas * self.context

    @property
    def expert_span(self) -> int:
        """Count the neighbouring ranks that have every expert once."""
        return self.expert * self.expert_tensor

    @property
    def summing(self) -> int:
        """Return the ZeRO stage whose messages sum gradients: in a pipeline 2 sums once per step, like 1."""
        return 1 if self.stage == 2 and self.pipeline > 1 else self.stage

    @property
    def effort(self) -> tuple[bool, bool, bool, bool, int]:
        """Return a sort key of the changes to a model's code: few for sharding, many for pipelines and cut layers."""
        return (self.context > 1, *self.axes, self.expert > 1, self.stage)

    @property
    def megatron(self) -> bool:
        """Return whether it is Megatron-LM's, with or without distributed optimizer: it sums gradients in float32."""
        return max(self.tensor, self.pipeline, self.context, self.expert) > 1 and self.stage < 2

    @property
    def axes(self) -> tuple[bool, bool]:
        """Return whether there are pipelines, and cut layers."""
        return (self.pipeline > 1, self.tensor > 1)


def sharing(stage: int) -> str:
    """Return how replicas share state: dp if each keeps all of it, or a stage of ZeRO."""
    return f"zero{stage}" if stage else "dp"


# The compared kinds, with whole samples or samples cut by position: a name, whether layers are cut inside, whether they
# are cut between, and the replicas' ZeRO stage. Pipelines with stages 2 and 3 are compared too: a rank has a p-th of
# the layers, but ZeRO-3 gathers them for p times as many microbatches, so it sends as much as without a pipeline, which
# the cost includes (zero_bytes).
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
    """Yield possible layouts of one kind, with `context` those that cut samples; one replica is not sharded."""
    for t in _divisors(math.gcd(job.node_gpus, job.shape.heads)) if tensor else [1]:
        for c in [c for c in _divisors(job.gpus // t) if job.seq % (2 * c) == 0] if context else [1]:
            for p in _divisors(job.gpus // (t * c)) if pipeline else [1]:
                replicas = job.gpus // (t * c * p)
                for e in expert_groups(job, t * replicas * c):
                    found = Layout(t, p, replicas, stage, c, e, job.chunks if p > 1 else 1)
                    if (stage == 0 or replicas * c > 1) and not faults_of(job, found):
                        yield found


def expert_groups(job: Job, holding: int) -> list[int]:
    """Return over how many ranks experts can be distributed: common divisors, for a dense model 1."""
    return [1, *_divisors(math.gcd(job.shape.experts, holding))] if job.shape.experts else [1]


def impossible(job: Job, tensor: bool, pipeline: bool, stage: int) -> str:
    """Return why no layout of this kind is possible; its name has the ZeRO stage."""
    if job.gpus == 1:
        return "one GPU has no other to share with"
    reasons = []
    if tensor:
        reasons.append(f"t must divide the {job.node_gpus} GPUs of a node and the {job.shape.heads} heads")
    if pipeline:
        shared, alone = ("t·p", "p ") if tensor else ("p", "")
        times = f"{job.chunks} chunks of " if job.chunks > 1 else ""
        reasons.append(
            f"{shared} must divide the {job.gpus} GPUs, and {alone}must be at most the {times}{job.shape.layers} layers"
        )
    if not job.grows:
        batch = f"batch of {job.global_samples} samples in microbatches of {job.samples}"
        reasons.append(f"the replicas must share the {batch} equally")
    if stage > 0 and any(layouts(job, tensor, pipeline, 0)):
        reasons.append("ZeRO needs two replicas")
    return ", ".join(reasons)


def faults_of(job: Job, layout: Layout) -> list[str]:
    """Return why a layout is impossible, a sentence per fault with allowed values."""
    shape, found = job.shape, []
    for name, size, total, parts_name in (
        ("tp", layout.tensor, shape.heads, "attention heads"),
        ("tp", layout.tensor, job.node_gpus, "GPUs of a node, since a layer's sums go over its fast links"),
        ("etp", layout.expert_tensor, layout.tensor, "ranks of tp, over which each expert is cut"),
        ("ep", layout.expert, layout.tensor * layout.holding // layout.expert_tensor, "ranks of tp x dp x cp, over etp, that share the experts"),
        ("ep", layout.expert, shape.experts or 1, "experts of the model"),
    ):  # fmt: skip
        if total % size:
            found.append(
                f"{name}{size} does not divide the {total} {parts_name}, allowed: {listed([1, *_divisors(total)])}"
            )
    if layout.pipeline * layout.chunks > shape.layers:
        most = shape.layers // layout.chunks
        each = f" of {layout.chunks} chunks" if layout.chunks > 1 else ""
        found.append(f"pp{layout.pipeline}{each} is more stages than the {shape.layers} layers, allowed: up to {most}")
    if job.seq % (2 * layout.context) and layout.context > 1:
        found.append(
            f"cp{layout.context} does not cut --seq={job.seq} into {2 * layout.context} equal runs, allowed: a multiple of"
            f" {2 * layout.context}"
        )
    if job.global_samples % (job.samples * layout.replicas):
        possible = [d for d in [1, *_divisors(job.gpus)] if job.global_samples % (job.samples * d) == 0]
        found.append(
            f"dp{layout.replicas} does not share --global-batch={job.global_samples} in microbatches of {job.samples}"
            f" equally, allowed: {listed(possible) or 'another microbatch'}"
        )
    elif layout.chunks > 1 and (parts := job.global_samples // (job.samples * layout.replicas)) % layout.pipeline:
        found.append(
            f"--interleave={layout.chunks} needs a multiple of pp{layout.pipeline} microbatches, and a replica has {parts}:"
            " a smaller dp or microbatch, or --interleave 1"
        )
    return found


def listed(numbers: Sequence[int]) -> str:
    few = ", ".join(map(str, numbers[:12]))
    return f"{few}, ..." if len(numbers) > 12 else few


AXES = ("tp", "pp", "dp", "cp", "ep", "etp")


def given_layout(written: str, job: Job, stage: int) -> tuple[Layout | None, list[str]]:
    """Parse tp8,pp16,dp64,cp1,ep1,etp1; returns the layout and its faults. Without dp it takes the remaining GPUs."""
    sizes: dict[str, int] = {}
    faults = []
    for word in written.lower().split(","):
        match = re.fullmatch(r"\s*(tp|pp|dp|cp|ep|etp)\s*([1-9][0-9]{0,8})\s*", word)
        if match is None:
            faults.append(
                f"--layout={written!r} has {word.strip()!r}, allowed: {', '.join(f'{axis}N' for axis in AXES)}"
            )
        elif match[1] in sizes:
            faults.append(f"--layout={written!r} names {match[1]} twice")
        else:
            sizes[match[1]] = int(match[2])
    if faults:
        return None, faults
    cut = sizes.get("tp", 1) * sizes.get("pp", 1) * sizes.get("cp", 1)
    replicas = sizes.get("dp", max(1, job.gpus // cut))
    pipeline = sizes.get("pp", 1)
    found = Layout(
        sizes.get("tp", 1), pipeline, replicas, stage, sizes.get("cp", 1), sizes.get("ep", 1),
        job.chunks if pipeline > 1 else 1, sizes.get("etp", 1),
    )  # fmt: skip
    if found.gpus != job.gpus:
        rest = f"dp{job.gpus // cut} would make it" if job.gpus % cut == 0 else f"{cut} does not divide {job.gpus}"
        return None, [f"--layout={written!r} is of {found.gpus} GPUs (tp·pp·dp·cp) and --gpus={job.gpus}: {rest}"]
    faults += [f"--layout={written!r}: {fault}" for fault in faults_of(job, found)]
    if stage and found.holding == 1:
        faults.append(f"--zero={stage} shards over dp x cp, which is one rank in --layout={written!r}: --zero 0")
    return found, faults


@cache
def _divisors(number: int) -> Sequence[int]:
    """Return the divisors from 2 on."""
    small = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    return sorted({*small, *(number // divisor for divisor in small)} - {1})
