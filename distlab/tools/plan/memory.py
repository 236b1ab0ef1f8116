"""Memory per rank of a layout, by class; if ranks differ, of the one that needs most.

At rest a rank stores its ZeRO shard of weights, gradients and optimizer state (distlab/techniques/sharded/costs.py).
Added to it are the layers that ZeRO-3 has gathered, the activations saved for the backward pass, and the scores over
the vocabulary while the loss is computed. The last stage of a pipeline has the scores and one microbatch in flight, the
first one has p.
"""

from distlab.techniques.pipeline_parallel.costs import in_flight
from distlab.techniques.sharded.costs import WHOLE_LAYERS, rest_bytes
from distlab.techniques.tensor_parallel.costs import layer_activation_bytes
from distlab.tools.plan.job import Job
from distlab.tools.plan.layout import Layout

ROUNDED = 0.025  # error of a mixture's published number of parameters
ADAPTER_BYTES = 16  # per trained parameter of LoRA: 2 + 2 + 12, as in mixed precision


def microbatches(job: Job, layout: Layout) -> int:
    """Return M = B/(b·d), the microbatches per replica and step."""
    return job.global_samples // (job.samples * layout.replicas)


def layers(job: Job, layout: Layout) -> int:
    """Return the layers of the fullest stage, ⌈L/p⌉."""
    return -(-job.shape.layers // layout.pipeline)


def rank_tokens(job: Job, layout: Layout) -> float:
    """Return b·s/c, the rows of a rank's products per microbatch."""
    return job.samples * job.seq / layout.context


def dense_parameters(job: Job, layout: Layout) -> float:
    """Count a rank's parameters in the fullest stage, before ZeRO and without experts: its layers, and embedding or
    output layer, which are on two stages."""
    shape = job.shape
    ends = min(job.num_parameters, shape.ends) if layout.pipeline == 1 else min(job.num_parameters, shape.vocabulary * shape.width)  # fmt: skip
    return (dense_body(job) * layers(job, layout) / shape.layers + ends) / layout.tensor


def dense_body(job: Job) -> float:
    """Count the parameters of all layers without experts: the given number minus the shape's other parts. A mixture's
    published number is rounded too coarsely for that, so the shape alone decides."""
    shape, published = job.shape, job.num_parameters - job.shape.ends - job.shape.expert_parameters
    of_shape = shape.body - shape.expert_parameters
    close = shape.experts and abs(published - of_shape) < ROUNDED * job.num_parameters
    return of_shape if close else max(0.0, published)


def expert_parameters(job: Job, layout: Layout) -> float:
    """Count the parameters of this rank's experts."""
    return job.shape.expert_parameters * layers(job, layout) / job.shape.layers / layout.expert_span


def own_parameters(job: Job, layout: Layout) -> float:
    return dense_parameters(job, layout) + expert_parameters(job, layout)


def gradient_itemsize(job: Job, layout: Layout) -> int:
    """Return a gradient's bytes: 4 for Megatron-LM with 16-bit weights and ZeRO-2 in a pipeline; else a weight's."""
    whole = layout.megatron or (layout.stage == 2 and layout.pipeline > 1)
    return 4 if whole and job.weights.masters else job.itemsize


def memory_by_class(job: Job, layout: Layout) -> dict[str, float]:
    """Return a rank's bytes at its peak: parameters, gradients, optimizer, gathered, activations, logits.

    One process with one microbatch has all activations before any gradient, and all gradients after the last
    activation: the larger counts.
    """
    activations, logits = passing_bytes(job, layout)
    rest = at_rest(job, layout)
    if layout.gpus == 1 and microbatches(job, layout) == 1:
        rest["gradients"] = max(0.0, rest["gradients"] - activations - logits)
    return rest | {"gathered": gathered_bytes(job, layout), "activations": activations, "logits": logits}


def held_bytes(job: Job, layout: Layout) -> float:
    """Return a rank's bytes of all classes together."""
    return sum(memory_by_class(job, layout).values())


def at_rest(job: Job, layout: Layout) -> dict[str, float]:
    """Return the bytes between two steps. In a pipeline ZeRO-2 accumulates whole gradients in float32 until the last
    microbatch (Llama 3, section 3.3.2, and PyTorch's pipelines over fully_shard)."""
    if job.savings.lora:
        return adapters_at_rest(job, layout)
    weights, total = job.weights, {"parameters": 0.0, "gradients": 0.0, "optimizer": 0.0}
    parts = [(dense_parameters(job, layout), float(layout.holding))]
    if job.shape.experts:
        parts.append((expert_parameters(job, layout), max(1.0, layout.tensor * layout.holding / layout.expert_span)))
    for own, ranks in parts:
        part = rest_bytes(
            layout.stage, own, own / ranks, itemsize=weights.itemsize, masters=weights.masters,
            moments=weights.moment_bytes / (4 if weights.masters else weights.itemsize),
            gradient_itemsize=gradient_itemsize(job, layout),
        )  # fmt: skip
        if layout.stage == 2 and layout.pipeline > 1:
            part["gradients"] = own * gradient_itemsize(job, layout)
        if job.savings.no_sync and layout.stage == 3 and microbatches(job, layout) > 1:
            part["parameters"] += own * weights.itemsize
            part["gradients"] = own * gradient_itemsize(job, layout)
        total = {name: total[name] + part[name] for name in total}
    if job.savings.step_in_backward:
        total["gradients"] /= layers(job, layout)
    if job.savings.offload:  # FSDP offloads all shards, ZeRO-Offload only the optimizer's
        total = total | {"optimizer": 0.0} if layout.stage < 3 else dict.fromkeys(total, 0.0)
    return total


def adapters_at_rest(job: Job, layout: Layout) -> dict[str, float]:
    """Return LoRA's bytes (Hu et al. 2021): r·(inner + outer) numbers per matrix are trained, others frozen; embedding
    and output layer in 16 bits."""
    own, shared = own_parameters(job, layout), layout.holding if layout.stage == 3 else 1
    ends = min(own, job.shape.ends / layout.tensor)
    trained = adapter_parameters(job) * layers(job, layout) / job.shape.layers / layout.tensor
    own_trained = trained / (layout.holding if layout.stage else 1)
    return {
        "parameters": ((own - ends) * job.savings.base_itemsize + ends * job.itemsize) / shared
        + trained * job.itemsize,
        "gradients": trained * job.itemsize,
        "optimizer": 0.0 if job.savings.offload else own_trained * (ADAPTER_BYTES - 2 * 2),
    }


def adapter_parameters(job: Job) -> float:
    shape = job.shape
    return float(job.savings.lora * shape.layers * sum(sum(each) for each in (*shape.attention, *shape.mlp)))


def gathered_bytes(job: Job, layout: Layout) -> float:
    """Return the bytes of gathered weights: ZeRO-3's layers, or at least embedding or output layer."""
    if layout.stage != 3 or layout.holding == 1:
        return 0.0
    own, item = own_parameters(job, layout), job.savings.base_itemsize if job.savings.lora else job.itemsize
    ends = min(job.num_parameters, job.shape.vocabulary * job.shape.width) / layout.tensor
    in_layers = max(0.0, own - ends) / layers(job, layout)
    return max(WHOLE_LAYERS * in_layers, 2 * ends) * item


def passing_bytes(job: Job, layout: Layout) -> tuple[float, float]:
    """Return activations and logits of the stage with more of them: the first or the last."""
    layer, saved = layer_bytes(job, layout), saved_bytes(job, layout)
    again = layer if job.recompute in ("half", "full") else 0.0
    depth, scores = layers(job, layout), logits_bytes(job, layout)
    first = saved * depth * flying(job, layout) + again
    if layout.pipeline == 1:
        return first, scores
    last = saved * depth + again
    return (last, scores) if last + scores > first else (first, 0.0)


def flying(job: Job, layout: Layout) -> float:
    """Return microbatches in flight in stage 1: min(p, M); with v chunks 1 + (p-1)/(p·v) times as many (Korthikanti
    4.2.3)."""
    p, v, parts = layout.pipeline, layout.chunks, microbatches(job, layout)
    if p == 1:
        return 1.0
    if v == 1:
        return in_flight("1f1b", p, parts, 0)
    return min(float(parts), p + (p - 1) / v)


def saved_bytes(job: Job, layout: Layout) -> float:
    """Return the bytes saved per layer and microbatch until its backward pass."""
    whole = layer_bytes(job, layout)
    input_bytes = boundary_bytes(job, layout) / sliced(job, layout)
    return {"none": whole, "selective": whole, "half": (whole + input_bytes) / 2, "full": input_bytes}[job.recompute]


def sliced(job: Job, layout: Layout) -> int:
    """Return over how many ranks sequence parallelism splits activations."""
    return layout.tensor if job.sequence_parallel else 1


def layer_bytes(job: Job, layout: Layout) -> float:
    """Return the activation bytes per layer and microbatch without recomputation, except what attention recomputes.

    A gated layer without dropout keeps the inputs of its norms, of attention and of the feed-forward part, 4·h numbers
    per token, which sequence parallelism cuts, and queries, keys, values, attention's output and three times the inner
    width, which tensor parallelism cuts. Any other is Korthikanti's, with dropout (distlab/techniques/tensor_parallel/costs.py).
    """
    shape, tokens, t = job.shape, rank_tokens(job, layout), layout.tensor
    scores = not job.flash and job.recompute != "selective"
    if not shape.gated:
        return layer_activation_bytes(
            job.seq, job.samples, shape.width, shape.heads, itemsize=job.itemsize, tensor_ranks=t,
            sequence_parallel=job.sequence_parallel, recompute="none" if scores else "selective",
        ) / layout.context  # fmt: skip
    mixed = shape.moe_layers / shape.layers
    inner = 3 * (1 - mixed) * (shape.dense_width or shape.mlp_width)
    inner += mixed * (3 * shape.mlp_width * shape.experts_a_token + 3 * shape.shared_width)
    routed = mixed * shape.experts_a_token * shape.width
    heads = shape.heads * (shape.head + shape.value) + shape.keys + shape.q_rank + shape.kv_rank
    numbers = 4 * shape.width / sliced(job, layout) + (heads + inner + routed) / t
    return tokens * job.itemsize * (numbers + (2 * shape.heads * job.seq / t if scores else 0.0))


def boundary_bytes(job: Job, layout: Layout) -> float:
    """Return the bytes of one microbatch between two layers, of b·s·h/c numbers."""
    return rank_tokens(job, layout) * job.shape.width * job.itemsize


# Bytes of a score. fp32: in 16 bits, in float32, their softmax and gradient in float32, and in 16 bits again; fused: in 16
# bits and their gradient in its place, and a block in float32; chunked: an eighth of the tokens at a time.
LOGIT_BYTES = {"fp32": 12.0, "fused": 5.0, "chunked": 12 / 8}


def logits_bytes(job: Job, layout: Layout) -> float:
    """Return the bytes of vocabulary scores, softmax and gradient, b·s·V/t numbers each."""
    of_score = LOGIT_BYTES[job.loss] * max(1, job.itemsize / 4)
    return rank_tokens(job, layout) * job.shape.vocabulary / layout.tensor * of_score
