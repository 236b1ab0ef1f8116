"""Seconds of a step by part: a rank's compute, its messages that compute does not hide, its bubble, its update.

A rank of the fullest stage does, of each of its M microbatches, for each layer

  products    2·m·k·n FLOP at a share of the peak that large products reach, and (m·k + k·n + m·n) numbers read and
              written: a narrow product is bound by memory (roofline: Williams et al. 2009, with both added up, since a
              product's first and last tiles do not overlap); forward once, backward twice, and forward again if recomputed
  attention   2·s·h FLOP a token under a causal mask, backward 2.5 times that, since FlashAttention computes scores
              again (Dao et al. 2022); at a share of its own
  elementwise norms, residuals, rotary positions, activation functions and copies at the memory's rate
  vocabulary  the output layer's product, and its scores in float32

and waits for

  tensor      two all_reduces forward and two backward (Shoeybi et al. 2019), one more a part if recomputed
  context     keys and values on their way round, less what attention hides
  expert      tokens to their experts and back, four all_to_alls of a mixture's layer
  pipeline    activations to the next stage
  data        sums of gradients, which hide under the last microbatch's backward pass (ZeRO-2's under each); ZeRO-3's
              gathers, which hide under compute but for the first layer of each pass; the gather of new weights
  bubble      (p-1)/(v·M) of the time of all microbatches, once (Narayanan et al. 2021, section 2.2)
  update      the optimizer's numbers read and written once

A group over several nodes runs at the rate of all cards of a node that are in it, since NCCL's rings use each one's link.
"""

import math
from collections.abc import Sequence

from distlab.techniques.collectives.costs import (
    all_reduce_bytes,
    all_reduce_rounds,
    attention_flops,
    exposed_seconds,
    message_seconds,
    training_flops,
)
from distlab.techniques.context_parallel.costs import even_ring_bytes, even_ring_turns
from distlab.techniques.pipeline_parallel.costs import bubble, pipeline_ends
from distlab.techniques.sharded.costs import zero_bytes
from distlab.techniques.tensor_parallel.costs import gathered_again_bytes, slice_sums, tensor_parallel_bytes
from distlab.tools.plan.job import Job, Link
from distlab.tools.plan.layout import Layout
from distlab.tools.plan.memory import (
    boundary_bytes,
    dense_body,
    dense_parameters,
    expert_parameters,
    gradient_itemsize,
    layers,
    microbatches,
    own_parameters,
    rank_tokens,
    sliced,
)
from distlab.tools.plan.model import Shape

SLICES = 2  # of a layer: attention and the feed-forward part
BACKWARD_ATTENTION = 2.5
AGAIN = {"none": 0.0, "selective": 0.0, "half": 0.5, "full": 1.0}  # of the forward pass
# Numbers of h that a layer reads and writes besides its products, forward: two norms (4), two residual sums (6), rotary
# positions and copies round attention (6); backward twice as many.
# Each copy of a token is sorted by rank and by expert on its way to an expert's rows and on its way back: 2·4.
NORM_PASSES, COPY_PASSES, ROUTED_PASSES = 10, 6, 8
PIECES = 4  # into which a sum is cut to overlap with a product
LOGIT_PASSES = 6 * 4  # bytes of a score: six passes in float32
PCIE_BYTES_PER_S, HOST_BYTES_PER_S = 25e9, 50e9  # of one GPU's link to the host, and its share of the host's memory


# Compute.


def compute_parts(job: Job, layout: Layout) -> dict[str, float]:
    """Return the seconds of all M microbatches on a rank of the fullest stage."""
    parts, depth = microbatches(job, layout), layers(job, layout)
    named = {"products": products_s, "attention": attention_s, "elementwise": elementwise_s}
    layer = {name: of_layer(job, layout) for name, of_layer in named.items()}
    ends = ends_s_over_stages(job, layout, sum(layer.values()), vocabulary_s(job, layout))
    return {name: parts * depth * seconds for name, seconds in layer.items()} | {"vocabulary": parts * ends}


def ends_s_over_stages(job: Job, layout: Layout, layer_s: float, ends_s: float) -> float:
    """Return the output layer's extra seconds per microbatch. The last stage has as many layers as the fullest, where p
    divides them, or else what is left of them; balanced stages share layers and output layer."""
    whole, depth = job.shape.layers, layers(job, layout)
    last = max(0, whole - depth * (layout.pipeline - 1))
    if job.balanced:
        return max(0.0, (whole * layer_s + ends_s) / layout.pipeline - depth * layer_s)
    return max(0.0, ends_s - (depth - last) * layer_s)


def passes(job: Job) -> float:
    """Count passes of a product: forward, input gradient, weight gradient (not with LoRA), and recomputed
    forward."""
    return (2 if job.savings.lora else 3) + AGAIN[job.recompute]


def product_s(job: Job, rows: float, inner: float, outer: float, *, fp8: bool = False, share: float = 1.0) -> float:
    flops, gpu = 2 * rows * inner * outer, job.gpu
    numbers = rows * inner + inner * outer + rows * outer
    peak = gpu.fp8_flops * gpu.shares.fp8 if fp8 else gpu.flops
    return flops / (peak * gpu.shares.matrix * share) + numbers * job.itemsize / memory_rate(job)


def memory_rate(job: Job) -> float:
    return job.gpu.memory_bytes_per_s * job.gpu.shares.memory


def products_s(job: Job, layout: Layout) -> float:
    """Return the seconds of a microbatch in one layer's matrices, all passes; in a mixture with its experts."""
    shape, tokens, t = job.shape, rank_tokens(job, layout), layout.tensor
    mixed = shape.moe_layers / shape.layers
    once = sliced_s(job, tokens, shape.attention, t) + (1 - mixed) * sliced_s(job, tokens, shape.dense, t)
    routed = 0.0
    if mixed:
        once += mixed * sliced_s(job, tokens, shape.beside_experts, t)
        local = shape.experts / layout.expert  # of a rank, which share the tokens that come to it
        rows = tokens * layout.expert_tensor / t * shape.experts_a_token / local
        routed = local * sliced_s(job, rows, shape.mlp, layout.expert_tensor, job.gpu.shares.experts)
    return passes(job) * (once * scale(job) + mixed * routed)


def sliced_s(job: Job, rows: float, matrices: Sequence[tuple[float, float]], slices: int, share: float = 1.0) -> float:
    """Return the seconds of one pass of rows through matrices, the last cut by rows, the others by columns."""
    *columns, (inner, outer) = matrices
    cut = [(width, each / slices) for width, each in columns] + [(inner / slices, outer)]
    return sum(product_s(job, rows, *each, fp8=job.fp8, share=share) for each in cut)


def scale(job: Job) -> float:
    """Return given parameters without experts divided by the shape's."""
    of_shape = job.shape.body - job.shape.expert_parameters
    return dense_body(job) / of_shape if dense_body(job) > 0 else 1.0


def attention_s(job: Job, layout: Layout) -> float:
    """Return the seconds of its two products with a token's positions, with a causal mask s/2 on average."""
    flops = attention_token_flops(job.shape, job.seq) * rank_tokens(job, layout) / layout.tensor
    again = 1.0 if job.recompute == "full" else 0.0
    return flops * (1 + BACKWARD_ATTENTION + again) / (job.gpu.flops * job.gpu.shares.attention)


def attention_token_flops(shape: Shape, seq: int) -> float:
    """Return forward FLOP per token and layer; a GPT's are 2·s·h."""
    return 2 * shape.seen(seq) * shape.heads * (shape.head + shape.value)


def elementwise_s(job: Job, layout: Layout) -> float:
    """Return memory-bound seconds; without FlashAttention also of scores, five times forward."""
    shape, t = job.shape, layout.tensor
    mixed = shape.moe_layers / shape.layers
    inner = (1 - mixed) * (shape.dense_width or shape.mlp_width)
    inner += mixed * (shape.mlp_width * shape.experts_a_token + shape.shared_width)
    activation = (3 if shape.gated else 2) * inner
    copies = COPY_PASSES * shape.heads * shape.value + mixed * ROUTED_PASSES * shape.experts_a_token * shape.width
    forward = NORM_PASSES * shape.width / sliced(job, layout) + (copies + activation) / t
    if not job.flash:
        forward += 5 * shape.heads * job.seq / t
    count = forward * (3 + (1.0 if job.recompute == "full" else 0.0))
    if job.fp8:  # numbers are cast to 8 bits before each product, forward and backward
        count += 12 * shape.width / t
    return rank_tokens(job, layout) * count * job.itemsize / memory_rate(job)


def vocabulary_s(job: Job, layout: Layout) -> float:
    """Return seconds of output layer (never in 8 bits or recomputed) and loss per microbatch."""
    tokens, outer = rank_tokens(job, layout), job.shape.vocabulary / layout.tensor
    if not job.shape.vocabulary:
        return 0.0
    return 3 * product_s(job, tokens, job.shape.width, outer) + tokens * outer * LOGIT_PASSES / memory_rate(job)


# Messages: bytes per step by axis, and the part of their time that nothing hides.


def sent(job: Job, layout: Layout) -> dict[str, float]:
    """Return the bytes per step and axis that a rank of the fullest, middle stage sends."""
    parts = microbatches(job, layout)
    ends = pipeline_ends(layout.pipeline, layout.chunks, 1 if layout.pipeline > 2 else 0)
    return {
        "data": sum(summed_bytes(job, layout, own, ranks) for own, ranks, _ in copies(job, layout)),
        "tensor": slice_bytes(job, layout) + gathered_again(job, layout),
        "context": ring_bytes(job, layout),
        "expert": dispatched(job, layout),
        "pipeline": ends * parts * boundary_bytes(job, layout) / sliced(job, layout),
    }


def copies(job: Job, layout: Layout) -> list[tuple[float, int, int]]:
    """Return replicated parameters: their number, their number of ranks, and the distance of these ranks. Distributed
    experts are on fewer ranks, which are farther apart, mostly one per node."""
    dense, experts = dense_parameters(job, layout), expert_parameters(job, layout)
    ranks = layout.tensor * layout.holding // layout.expert_span
    replicated = [(dense, layout.holding, layout.tensor), (experts, ranks, layout.expert_span)]
    return replicated if experts else replicated[:1]


def summed_bytes(job: Job, layout: Layout, own: float, ranks: int) -> float:
    """Return the bytes per step that a rank sends for its parameters with this many replicas."""
    weights, gradients = own * job.itemsize, own * gradient_itemsize(job, layout)
    if job.savings.lora or ranks == 1:
        return 0.0
    stage, parts = layout.summing, microbatches(job, layout)
    if stage == 1:  # a sum of gradients and a gather of weights
        return zero_bytes(1, ranks, (gradients + weights) / 2, parts)
    return zero_bytes(stage, ranks, gradients, parts) if stage else all_reduce_bytes("gloo", ranks, int(gradients))


def exposed_s(job: Job, messages_s: float, compute_s: float) -> float:
    """Return message time that compute does not hide: all, if both use the same cores."""
    return exposed_seconds(messages_s, compute_s if job.hides else 0.0)


def slice_bytes(job: Job, layout: Layout) -> float:
    """Return the bytes per step that slices wait for: the sums of g and f."""
    slices = SLICES * layers(job, layout) * microbatches(job, layout)
    recompute = "full" if job.recompute == "full" else "none"
    return slices * tensor_parallel_bytes(layout.tensor, 1, int(boundary_bytes(job, layout)), recompute)


def gathered_again(job: Job, layout: Layout) -> float:
    """Return the bytes of inputs that sequence parallelism gathers again in backward passes."""
    slices = SLICES * layers(job, layout) * microbatches(job, layout)
    again = gathered_again_bytes(layout.tensor, 1, int(boundary_bytes(job, layout)))
    return slices * again if job.sequence_parallel else 0.0


def ring_bytes(job: Job, layout: Layout) -> float:
    """Return the bytes per step around a sample's ring: K and V of this rank's heads, and their gradients."""
    both = job.samples * job.seq * job.shape.keys / layout.tensor * job.itemsize
    of_layer = even_ring_bytes(both, layout.context, again=job.recompute == "full")
    return layers(job, layout) * microbatches(job, layout) * of_layer


def dispatched(job: Job, layout: Layout) -> float:
    """Return the bytes per step to other ranks' experts and back: 4·k·b·s·h·(e-1)/e per layer."""
    return trips(job, layout) * job.shape.experts_a_token * trip_bytes(job, layout) * (1 - 1 / layout.expert)


def trips(job: Job, layout: Layout) -> float:
    """Count a step's transfers of tokens to experts or back: four per microbatch and mixture layer."""
    return 4 * layers(job, layout) * job.shape.moe_layers / job.shape.layers * microbatches(job, layout)


def trip_bytes(job: Job, layout: Layout) -> float:
    """Return the bytes of a rank's tokens in a microbatch."""
    return boundary_bytes(job, layout) / layout.tensor


def copies_to_nodes(job: Job, layout: Layout) -> float:
    """Count a token's copies to other nodes: one per expert there, or one per node with experts, at most as many as its
    groups of experts."""
    nodes = max(1.0, layout.expert_span / job.node_gpus)
    experts = job.shape.experts_a_token
    if not job.once_a_node:
        return experts * (1 - 1 / nodes)
    reached = nodes * (1 - (1 - 1 / nodes) ** experts)
    return min(reached, job.shape.expert_groups or reached) * (1 - 1 / nodes)


def link_of(job: Job, span: int, cards: int = 1) -> Link:
    """Return the link of a group over so many neighbouring ranks, of which `cards` are in each node: inside a node its
    own link, between nodes those of its cards together, which are no faster than the node's."""
    if job.node_gpus % span == 0:
        return job.node_link
    together = min(job.node_link.effective, max(1, cards) * job.link.effective)
    return Link(job.link.latency_s, together, halves=job.link.halves)


def exposed_parts(job: Job, layout: Layout, compute: dict[str, float]) -> dict[str, float]:
    """Return the seconds per step that each axis waits for, given `compute` by part."""
    compute_s, attention, products = sum(compute.values()), compute["attention"], compute["products"]
    return {
        "tensor": tensor_s(job, layout, products),
        "context": ring_s(job, layout, attention),
        "expert": exposed_s(job, expert_s(job, layout), compute_s if job.overlap_ep else 0.0),
        "pipeline": pipeline_s(job, layout),
        "data": data_s(job, layout, compute_s),
    }


def messages_without_overlap(job: Job, layout: Layout) -> dict[str, float]:
    """Return the seconds of each axis' messages without overlap."""
    return exposed_parts(job, layout, dict.fromkeys(("products", "attention"), 0.0))


def tensor_s(job: Job, layout: Layout, products: float) -> float:
    """Return seconds of a layer's sums; in pieces that overlap the products (--overlap-tp, as Megatron-LM's
    tp_comm_overlap does) they hide but for one piece in four."""
    sums = SLICES * layers(job, layout) * microbatches(job, layout) * slice_sums("full" if job.recompute == "full" else "none")  # fmt: skip
    rounds = sums * all_reduce_rounds("ring", layout.tensor)
    all_s = message_seconds(rounds, slice_bytes(job, layout), job.node_link.latency_s, job.node_link.effective)
    all_s *= job.node_link.halves if job.sequence_parallel else 1.0
    return all_s / PIECES + exposed_s(job, all_s * (1 - 1 / PIECES), products) if job.overlap_tp else all_s


def ring_s(job: Job, layout: Layout, attention: float) -> float:
    """Return the ring's seconds that attention does not hide: per layer also the gradients' last turn,
    after which nothing is computed."""
    if layout.context == 1:
        return 0.0
    link = link_of(job, layout.tensor * layout.context)
    turns = even_ring_turns(layout.context, again=job.recompute == "full")
    rounds = turns * layers(job, layout) * microbatches(job, layout)
    all_s = message_seconds(rounds, ring_bytes(job, layout), link.latency_s, link.effective)
    last_s = all_s / turns
    return last_s + exposed_s(job, all_s - last_s, attention)


def expert_s(job: Job, layout: Layout) -> float:
    """Return seconds to other nodes over a rank's own card, and at once inside a node."""
    if layout.expert == 1:
        return 0.0
    near, far, calls = job.node_link, link_of(job, layout.expert_span), trips(job, layout)
    inside = min(layout.expert_span, job.node_gpus)
    inside_s = job.shape.experts_a_token * (1 - 1 / inside) * trip_bytes(job, layout) / near.effective
    outside_s = copies_to_nodes(job, layout) * trip_bytes(job, layout) / far.effective
    rounds = inside - 1 + layout.expert_span / inside - 1
    return calls * (max(inside_s, outside_s) + rounds * far.latency_s)


def pipeline_s(job: Job, layout: Layout) -> float:
    """An activation to the next stage and a gradient back; between the two ends of a step sends hide under compute, or
    none does: then each of the v·M + p - 1 turns of a step has one each way."""
    if layout.pipeline == 1:
        return 0.0
    link = link_of(job, layout.gpus)
    once = boundary_bytes(job, layout) / sliced(job, layout)
    turns = layout.pipeline if job.hides else layout.chunks * microbatches(job, layout) + layout.pipeline - 1
    return message_seconds(2 * turns, 2 * turns * once, link.latency_s, link.effective)


def data_s(job: Job, layout: Layout, compute_s: float) -> float:
    """Return seconds of sums and gathers over replicas that no compute hides."""
    parts, depth, stage = microbatches(job, layout), layers(job, layout), layout.summing
    backward_s = compute_s * 2 / 3 / parts
    moves = {0: 1, 1: 2, 2: parts + 1, 3: 3 * parts}[stage]
    move_s = sum(move_seconds(job, layout, moves, *each) for each in copies(job, layout) if each[1] > 1)
    if not move_s or stage == 0:
        return exposed_s(job, move_s, backward_s)
    if stage == 3:
        # Forward and backward: nothing computes during the gather of a pass' first layer.
        first_s = 2 * parts * move_s / depth
        return first_s + exposed_s(job, moves * move_s - first_s, compute_s)
    return exposed_s(job, move_s, backward_s) * (parts if stage == 2 else 1) + move_s


def move_seconds(job: Job, layout: Layout, moves: int, own: float, ranks: int, distance: int) -> float:
    """Return seconds of one sum or gather of all layers, or in plain data parallelism both halves of a sum."""
    link = link_of(job, distance * ranks, min(max(1, job.node_gpus // distance), ranks))
    rounds = all_reduce_rounds("ring", ranks) * layers(job, layout) / (2 if layout.stage else 1)
    halves = link.halves if layout.stage else 1.0
    nbytes = summed_bytes(job, layout, own, ranks)
    return message_seconds(rounds, nbytes / moves, link.latency_s, link.effective) * halves


def update_s(job: Job, layout: Layout) -> float:
    """Return the update's seconds: read gradients, masters, moments; write the latter two and the weights."""
    own = own_parameters(job, layout) / (layout.holding if layout.stage else 1)
    if job.savings.lora or math.isinf(memory_rate(job)):
        return 0.0
    nbytes = float(gradient_itemsize(job, layout) + job.itemsize)
    nbytes += 2 * (job.weights.moment_bytes + (4 if job.weights.masters else job.itemsize))
    if job.savings.offload:
        return own * (2 * job.itemsize / PCIE_BYTES_PER_S + nbytes / HOST_BYTES_PER_S)
    return own * nbytes / memory_rate(job)


def step_parts(job: Job, layout: Layout) -> dict[str, float]:
    """Return the seconds of a step by part."""
    compute = compute_parts(job, layout)
    exposed = exposed_parts(job, layout, compute)
    inside = sum(compute.values()) + exposed["tensor"] + exposed["context"] + exposed["expert"]
    idle = bubble(layout.pipeline, microbatches(job, layout), layout.chunks)
    return compute | exposed | {"bubble": inside * idle / (1 - idle), "update": update_s(job, layout)}


# Counts of operations.


def model_flops(job: Job) -> float:
    """Count a step as MFU does (Chowdhery et al. 2022, appendix B, with a causal mask): 6 per parameter and token that
    are multiplied, 6·L·s·h per token in attention; recomputation does not count."""
    shape = job.shape
    multiplied = max(0.0, job.num_parameters - shape.expert_parameters * unused(job) - shape.ends) + shape.vocabulary * shape.width  # fmt: skip
    products = training_flops(multiplied, job.step_tokens)
    attended = attention_token_flops(shape, job.seq) / (2 * job.seq)  # numbers per token that multiply all positions
    return products + attention_flops(shape.layers, round(attended), job.seq, job.step_tokens)


def unused(job: Job) -> float:
    """Return the share of the experts that a token does not use."""
    return 1 - job.shape.experts_a_token / job.shape.experts if job.shape.experts else 0.0


def executed_flops(shape: Shape, num_parameters: float, seq: int, tokens: float, recompute: str = "none") -> float:
    """Count a step's FLOP for this many tokens, with recomputation: products, attention and vocabulary."""
    again = AGAIN[recompute]
    experts = shape.expert_parameters * (1 - shape.experts_a_token / shape.experts) if shape.experts else 0.0
    products = 2 * (3 + again) * max(0.0, num_parameters - shape.ends - experts)
    attention = (
        attention_token_flops(shape, seq) * shape.layers * (1 + BACKWARD_ATTENTION + (1 if recompute == "full" else 0))
    )
    return tokens * (products + attention + 6 * shape.vocabulary * shape.width)
