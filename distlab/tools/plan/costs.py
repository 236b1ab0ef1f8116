"""The cost of one layout per rank: memory by class, bytes per step, seconds by part.

Every number is a formula of the techniques' costs.py with this layout's sizes. Each of d replicas runs M = B/(b·d)
microbatches per step, so that every layout trains the same global batch of B samples.
"""

from dataclasses import dataclass

from distlab.techniques.pipeline_parallel.costs import bubble
from distlab.tools.plan.gpu import band
from distlab.tools.plan.job import Job
from distlab.tools.plan.layout import Layout
from distlab.tools.plan.memory import memory_by_class, microbatches
from distlab.tools.plan.step_time import model_flops, sent, step_parts

COMPUTE = ("products", "attention", "elementwise", "vocabulary")
EXPOSED = ("tensor", "context", "expert", "pipeline", "data")


@dataclass(frozen=True)
class Cost:
    """A layout's cost per rank; if ranks differ, of the one that stores or sends most."""

    layout: Layout
    memory: dict[str, float]  # bytes: parameters, gradients, optimizer, gathered, activations, logits
    sent: dict[str, float]  # bytes per step: data, tensor, context, expert, pipeline
    parts: dict[str, float]  # seconds: those of COMPUTE and EXPOSED, bubble and update
    bubble: float  # share of the pipeline's time
    tokens_per_s: float
    mfu: float
    fits: bool

    @property
    def held_bytes(self) -> float:
        return sum(self.memory.values())

    def fit(self, usable_bytes: float) -> str:
        """Return yes or no, or may if the GPU's memory lies within the estimate's band."""
        if 1 / band("memory") < self.held_bytes / usable_bytes < band("memory"):
            return "may"
        return "yes" if self.fits else "no"

    @property
    def sent_bytes(self) -> float:
        return sum(self.sent.values())

    @property
    def compute_s(self) -> float:
        return sum(self.parts[name] for name in COMPUTE)

    @property
    def exposed_s(self) -> float:
        return sum(self.parts[name] for name in EXPOSED)

    @property
    def step_s(self) -> float:
        return sum(self.parts.values())

    @property
    def largest(self) -> str:
        """Return the largest class of memory."""
        return max(self.memory, key=lambda name: self.memory[name])


def cost(job: Job, layout: Layout) -> Cost:
    memory, parts = memory_by_class(job, layout), step_parts(job, layout)
    step_s = sum(parts.values())
    return Cost(
        layout, memory, sent(job, layout), parts, bubble(layout.pipeline, microbatches(job, layout), layout.chunks),
        job.step_tokens / step_s, model_flops(job) / step_s / (job.gpus * job.gpu.flops),
        fits=sum(memory.values()) <= job.usable_bytes,
    )  # fmt: skip
