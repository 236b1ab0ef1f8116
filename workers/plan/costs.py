"""What one layout costs a rank: memory by class, bytes a step, the bubble, and an estimate of the step.

Every number is a formula of workers/measure/formulas with this layout's sizes: a rank of the fullest stage holds
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

from dataclasses import dataclass

from workers.measure.formulas.activations import layer_activation_bytes, stage_activation_bytes
from workers.measure.formulas.collectives import all_reduce_rounds
from workers.measure.formulas.context import even_ring_turns
from workers.measure.formulas.pipelines import bubble, in_flight
from workers.measure.formulas.seconds import (
    attention_flops,
    exposed_seconds,
    message_seconds,
    step_seconds,
    training_flops,
)
from workers.measure.formulas.sharding import WHOLE_LAYERS, rest_bytes
from workers.measure.formulas.tensor import slice_sums
from workers.plan.job import Job, Link
from workers.plan.layouts import Layout
from workers.plan.traffic import (
    SLICES,
    gradient_itemsize,
    layers,
    microbatches,
    own_parameters,
    sent,
    turned,
    waited_for,
)

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
        """All classes."""
        return sum(self.memory.values())

    @property
    def sent_bytes(self) -> float:
        """Over all axes."""
        return sum(self.sent.values())


def cost(job: Job, layout: Layout) -> Cost:
    """The price of `layout`."""
    memory = held(job, layout)
    idle = bubble(layout.pipeline, microbatches(job, layout))
    compute_s = training_flops(job.num_parameters, job.global_samples * job.seq, job.recompute)
    compute_s *= layers(job, layout) * layout.pipeline / job.shape.layers  # every rank waits for the fullest stage
    compute_s /= job.gpus * job.flops * job.utilisation
    exposed = data_exposed_s(job, layout, compute_s) + inside_s(job, layout)
    return Cost(
        layout, memory, sent(job, layout), idle, compute_s, exposed, step_seconds(compute_s, idle, exposed),
        fits=sum(memory.values()) <= job.usable_bytes,
    )  # fmt: skip


def held(job: Job, layout: Layout) -> dict[str, float]:
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
