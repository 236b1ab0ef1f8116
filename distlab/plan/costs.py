"""What one layout costs a rank: memory by class, bytes a step, the bubble, and an estimate of the step.

Every number is a formula of the techniques' costs.py with this layout's sizes: a rank of the fullest stage holds
P/t·⌈L/p⌉/L parameters, and each of d replicas runs M = B/(b·d) microbatches a step, so that every layout trains the same
global batch of B samples. Where layers are cut inside, plainly or with ZeRO-1, it is Megatron-LM that is priced: its
gradients are summed in float32. What is assumed of time:

  compute    6·P FLOP a token (8·P if recomputed), at the given share of the peak, at the pace of the fullest stage
  messages   rings, T = rounds·α + bytes/B, a collective a layer, a group over nodes at the pace of the link between
             them
  hidden     sums of gradients under the backward pass (of the last microbatch, in ZeRO-2 and 3 of each), ZeRO-3's
             gathers under the compute of each microbatch, but for the first layer's of each pass: in a pipeline of few
             layers a stage, much; not hidden: ZeRO-1's and 2's gather of new weights, tensor parallelism, and the
             activations between stages
             the input of a slice that sequence parallelism gathers again in its backward pass (Korthikanti 4.2.2)

Where c ranks share a sample, each has a c-th of its positions, keys and values go round them (zigzag of RUN_MODE=cp and
RUN_MODE=mesh), and gradients are summed, and shards kept, over all d·c that hold the same. What goes round is hidden
under attention's own s·s, which compute leaves out for all layouts alike, but for the last turn of the gradients.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from distlab.collectives.costs import (
    all_reduce_bytes,
    all_reduce_rounds,
    attention_flops,
    exposed_seconds,
    message_seconds,
    step_seconds,
    training_flops,
)
from distlab.context_parallel.costs import even_ring_bytes, even_ring_turns
from distlab.pipeline_parallel.costs import bubble, in_flight, pipeline_ends
from distlab.plan.job import Job, Link
from distlab.sharded.costs import WHOLE_LAYERS, rest_bytes, zero_bytes
from distlab.tensor_parallel.costs import (
    gathered_again_bytes,
    layer_activation_bytes,
    slice_sums,
    stage_activation_bytes,
    tensor_parallel_bytes,
)

# How N ranks can be cut: t that share each layer, c that share each sample, p that share the layers, d replicas of
# that, sharded by ZeRO or not.
#
# Ranks of a tensor-parallel group are neighbours inside of one node, then come those that have other positions of a
# sample, then the stages of a pipeline, then the replicas. Stages may hold unequal numbers of layers, as those of
# Llama 3 405B do (126 layers in 16 stages): the fullest sets the pace. Every replica gets the same number of
# microbatches, and every rank along a sample two of 2c equal runs of its positions, so that all have as much to do
# (RUN_MODE=cp, zigzag).


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
        for c in [c for c in _divisors(job.gpus // t) if job.seq % (2 * c) == 0] if context else [1]:
            for p in _divisors(job.gpus // (t * c)) if pipeline else [1]:
                replicas = job.gpus // (t * c * p)
                dealt = job.global_samples % (job.samples * replicas) == 0
                if p <= job.shape.layers and dealt and (stage == 0 or replicas * c > 1):
                    yield Layout(t, p, replicas, stage, c)


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


@cache
def _divisors(number: int) -> Sequence[int]:
    """From 2 on."""
    small = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    return sorted({*small, *(number // divisor for divisor in small)} - {1})


# What a rank of one layout sends in a step, over each of its axes, and the sizes that this depends on.
#
# Of ranks that differ it is the one that sends most: one of the fullest stage, between two others. Where layers are
# cut inside, plainly or with ZeRO-1, gradients are Megatron-LM's, summed in float32.

SLICES = 2  # of a layer: attention and the two matrices behind it


def microbatches(job: Job, layout: Layout) -> int:
    """M = B/(b·d)."""
    return job.global_samples // (job.samples * layout.replicas)


def layers(job: Job, layout: Layout) -> int:
    """Of the fullest stage: ⌈L/p⌉."""
    return -(-job.shape.layers // layout.pipeline)


def own_parameters(job: Job, layout: Layout) -> float:
    """Of one rank of the fullest stage, before ZeRO shards them."""
    return job.num_parameters / layout.tensor * layers(job, layout) / job.shape.layers


def gradient_itemsize(job: Job, layout: Layout) -> int:
    """Bytes of a gradient: 4 where Megatron-LM sums those of 16-bit weights, else a weight's."""
    return 4 if layout.megatron and job.masters else job.itemsize


def boundary_bytes(job: Job, layout: Layout) -> float:
    """b·s·h/c: one microbatch between two layers."""
    return job.samples * job.seq * job.shape.width * job.itemsize / layout.context


def sent(job: Job, layout: Layout) -> dict[str, float]:
    """Bytes that a rank sends in a step over all that hold the same, its tensor-parallel group, the ranks of a sample and
    its pipeline."""
    weights, parts = own_parameters(job, layout) * job.itemsize, microbatches(job, layout)
    gradients = own_parameters(job, layout) * gradient_itemsize(job, layout)
    if layout.stage == 1:  # a sum of gradients and a gather of weights
        data = zero_bytes(1, layout.holding, (gradients + weights) / 2, parts)
    elif layout.stage:
        data = zero_bytes(layout.stage, layout.holding, gradients, parts)
    else:
        data = all_reduce_bytes("gloo", layout.holding, int(gradients))
    tensor = waited_for(job, layout) + gathered_again(job, layout)
    ends = pipeline_ends(layout.pipeline, 1, 1 if layout.pipeline > 2 else 0)
    cut = boundary_bytes(job, layout) / (layout.tensor if job.sequence_parallel else 1)
    return {"data": data, "tensor": tensor, "context": turned(job, layout), "pipeline": ends * parts * cut}


def turned(job: Job, layout: Layout) -> float:
    """Bytes of a step that go round the ranks of a sample: K and V of this rank's heads, and their gradients."""
    both = 2 * job.samples * job.seq * job.shape.width / layout.tensor * job.itemsize
    of_layer = even_ring_bytes(both, layout.context, again=job.recompute == "full")
    return layers(job, layout) * microbatches(job, layout) * of_layer


def waited_for(job: Job, layout: Layout) -> float:
    """Bytes of a step that slices wait for: what g and f sum."""
    slices = SLICES * layers(job, layout) * microbatches(job, layout)
    return slices * tensor_parallel_bytes(layout.tensor, 1, int(boundary_bytes(job, layout)), job.recompute)


def gathered_again(job: Job, layout: Layout) -> float:
    """And with sequence parallelism the inputs that backward passes gather again, under their compute."""
    slices = SLICES * layers(job, layout) * microbatches(job, layout)
    again = gathered_again_bytes(layout.tensor, 1, int(boundary_bytes(job, layout)))
    return slices * again if job.sequence_parallel else 0.0


BACKWARD = 2 / 3  # of a step's compute; the backward pass does twice what the forward pass does


@dataclass(frozen=True)
class Cost:
    """One layout's price a rank; of ranks that differ the one that holds or sends most."""

    layout: Layout
    memory: dict[str, float]  # bytes: parameters, gradients, optimizer, gathered, activations
    sent: dict[str, float]  # bytes a step: data, tensor, context, pipeline
    bubble: float
    compute_s: float
    exposed_s: float
    step_s: float
    fits: bool

    @property
    def held_bytes(self) -> float:
        return sum(self.memory.values())

    @property
    def sent_bytes(self) -> float:
        return sum(self.sent.values())


def cost(job: Job, layout: Layout) -> Cost:
    memory = memory_by_class(job, layout)
    idle = bubble(layout.pipeline, microbatches(job, layout))
    compute_s = training_flops(job.num_parameters, job.global_samples * job.seq, job.recompute)
    compute_s *= layers(job, layout) * layout.pipeline / job.shape.layers  # every rank waits for the fullest stage
    compute_s /= job.gpus * job.flops * job.utilisation
    exposed = data_exposed_s(job, layout, compute_s) + inside_s(job, layout)
    return Cost(
        layout, memory, sent(job, layout), idle, compute_s, exposed, step_seconds(compute_s, idle, exposed),
        fits=sum(memory.values()) <= job.usable_bytes,
    )  # fmt: skip


def memory_by_class(job: Job, layout: Layout) -> dict[str, float]:
    """Memory by class: what stands at rest, the whole layers that ZeRO-3 has gathered, and what the forward pass
    keeps."""
    own, shape, depth = own_parameters(job, layout), job.shape, layers(job, layout)
    rest = rest_bytes(
        layout.stage, own, own / layout.holding, itemsize=job.itemsize, moments=job.moments, masters=job.masters,
        gradient_itemsize=gradient_itemsize(job, layout),
    )  # fmt: skip
    layer, whole = (
        layer_activation_bytes(
            job.seq, job.samples, shape.width, shape.heads, itemsize=job.itemsize, tensor_ranks=layout.tensor,
            sequence_parallel=job.sequence_parallel, recompute=recompute,
        )
        / layout.context
        for recompute in (job.recompute, "none")
    )  # fmt: skip
    flying = in_flight("1f1b", layout.pipeline, microbatches(job, layout), 0) if layout.pipeline > 1 else 1
    kept = stage_activation_bytes(layer, depth, flying, whole if job.recompute == "full" else 0.0)
    gathered = WHOLE_LAYERS * own / depth * job.itemsize if layout.stage == 3 and layout.holding > 1 else 0.0
    return rest | {"gathered": gathered, "activations": kept}


def link_of(job: Job, ranks_apart: int) -> Link:
    """The link of a group that spans so many neighbouring ranks: a ring is as fast as its slowest link."""
    return job.link if job.node_gpus % ranks_apart else job.node_link


def data_exposed_s(job: Job, layout: Layout, compute_s: float) -> float:
    """What no compute hides of the sums and gathers over all that hold the same."""
    if layout.holding == 1:
        return 0.0
    link, nbytes = link_of(job, job.gpus), sent(job, layout)["data"]
    parts = microbatches(job, layout)
    depth = layers(job, layout)
    half = all_reduce_rounds("ring", layout.holding) / 2 * depth  # of a sum or of a gather, of all layers
    if layout.stage == 0:
        all_s = message_seconds(2 * half, nbytes, link.latency_s, link.bytes_per_s)
        return exposed_seconds(all_s, compute_s * BACKWARD / parts)
    moves = {1: 2, 2: parts + 1, 3: 3 * parts}[layout.stage]
    move_s = message_seconds(half, nbytes / moves, link.latency_s, link.bytes_per_s)
    if layout.stage == 3:
        # Forward and backward: nothing computes yet beside the gather of the layer that a pass begins with.
        first_s = 2 * parts * move_s / depth
        return first_s + exposed_seconds(moves * move_s - first_s, compute_s)
    sums_s = exposed_seconds(move_s, compute_s * BACKWARD / parts) * (parts if layout.stage == 2 else 1)
    return sums_s + move_s


def inside_s(job: Job, layout: Layout) -> float:
    """Messages that a layer or a stage waits for: tensor parallelism's sums, keys and values on their way round, and
    activations between stages."""
    nbytes, parts = sent(job, layout), microbatches(job, layout)
    near, far = job.node_link, link_of(job, layout.tensor * layout.context * layout.pipeline)
    slices = SLICES * layers(job, layout)
    rounds = slices * parts * slice_sums(job.recompute) * all_reduce_rounds("ring", layout.tensor)
    cuts = 2 * parts if layout.pipeline > 1 else 0
    tensor_s = message_seconds(rounds, waited_for(job, layout), near.latency_s, near.bytes_per_s)
    return tensor_s + ring_s(job, layout) + message_seconds(cuts, nbytes["pipeline"], far.latency_s, far.bytes_per_s)


def ring_s(job: Job, layout: Layout) -> float:
    """What attention does not hide of keys and values on their way round: of each layer the last turn of the gradients,
    behind which nothing is computed."""
    if layout.context == 1:
        return 0.0
    link = link_of(job, layout.tensor * layout.context)
    turns = even_ring_turns(layout.context, again=job.recompute == "full")
    rounds = turns * layers(job, layout) * microbatches(job, layout)
    all_s = message_seconds(rounds, turned(job, layout), link.latency_s, link.bytes_per_s)
    tokens = job.global_samples * job.seq
    attention = attention_flops(job.shape.layers, job.shape.width, job.seq, tokens, job.recompute)
    last_s = all_s / turns
    return last_s + exposed_seconds(all_s - last_s, attention / (job.gpus * job.flops * job.utilisation))
