"""How N ranks can be cut: t that share each layer, p that share the layers, d replicas of that, sharded by ZeRO or not.

Ranks of a tensor-parallel group are neighbours inside of one node, then come the stages of a pipeline, then the replicas.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from workers.plan.job import Job


@dataclass(frozen=True)
class Layout:
    """One way: t·p·d is the number of ranks; `stage` is ZeRO's, over the d replicas."""

    tensor: int
    pipeline: int
    replicas: int
    stage: int

    @property
    def name(self) -> str:
        """tp 8 x pp 2 x zero1 4; a factor of 1 is left out."""
        data = "dp" if self.stage == 0 else f"zero{self.stage}"
        alone = self.tensor == self.pipeline == 1
        parts = [f"tp {self.tensor}"] * (self.tensor > 1) + [f"pp {self.pipeline}"] * (self.pipeline > 1)
        return " x ".join(parts + ([data] if alone else [f"{data} {self.replicas}"] * (self.replicas > 1)))

    @property
    def effort(self) -> tuple[bool, bool, int]:
        """What it takes of a model's code, to be compared: sharding alone little, pipelines and cut layers much."""
        return (self.pipeline > 1, self.tensor > 1, self.stage)


# What is weighed: a name, whether layers are cut inside, whether they are cut between, and ZeRO's stage over the replicas.
KINDS = (
    ("dp", False, False, 0),
    ("zero1", False, False, 1),
    ("zero2", False, False, 2),
    ("zero3", False, False, 3),
    ("tp x dp", True, False, 0),
    ("tp x zero1", True, False, 1),
    ("pp x dp", False, True, 0),
    ("pp x zero1", False, True, 1),
    ("tp x pp x zero1", True, True, 1),
)


def layouts(job: Job, tensor: bool, pipeline: bool, stage: int) -> Iterator[Layout]:
    """All ways of one kind that these sizes allow; with one replica there is nothing to shard over."""
    for t in _divisors(job.gpus, 2, job.gpus_per_node) if tensor else [1]:
        if job.shape.heads % t:
            continue
        for p in _divisors(job.gpus // t, 2, job.shape.layers) if pipeline else [1]:
            replicas = job.gpus // (t * p)
            alone = replicas == 1 and stage == 1 and not (tensor and pipeline)  # stands in the kind without ZeRO
            if job.shape.layers % p == 0 and not alone:
                yield Layout(t, p, replicas, stage if replicas > 1 else 0)


def impossible(job: Job, tensor: bool, pipeline: bool, stage: int) -> str:
    """Why there is no way of this kind."""
    if job.gpus == 1:
        return "one GPU has nobody to share with"
    reasons = []
    if tensor:
        reasons.append(
            f"t divides the {job.gpus} GPUs and the {job.shape.heads} heads, up to {job.gpus_per_node} in a node"
        )
    if pipeline:
        reasons.append(f"p divides the {job.gpus} GPUs and the {job.shape.layers} layers")
    if stage == 1 and len(reasons) == 1:
        reasons.append("ZeRO-1 needs two replicas")
    return ", ".join(reasons)


def _divisors(number: int, least: int, most: int) -> list[int]:
    return [divisor for divisor in range(least, min(number, most) + 1) if number % divisor == 0]
