"""What a rank of one layout sends in a step, over each of its axes, and the sizes that this depends on.

Of ranks that differ it is the one that sends most: one of the fullest stage, between two others. Where layers are cut
inside, plainly or with ZeRO-1, gradients are Megatron-LM's, summed in float32.
"""

from workers.measure.formulas.collectives import all_reduce_bytes
from workers.measure.formulas.context import even_ring_bytes
from workers.measure.formulas.pipelines import pipeline_ends
from workers.measure.formulas.sharding import zero_bytes
from workers.measure.formulas.tensor import gathered_again_bytes, tensor_parallel_bytes
from workers.plan.job import Job
from workers.plan.layouts import Layout

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
