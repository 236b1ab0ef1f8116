"""Tensor parallelism: what stands at the ends of a slice, and what is summed over the ranks."""

from benchmarks.mutants import Mutant

GPT = "RUN_MODE=tp LAB_DEPTH=1 LAB_WIDTH=16 LAB_HEADS=4 LAB_SEQ=8 LAB_VARIANT="
TENSOR, SEQUENCE = "distlab/tensor_parallel/layers.py", "distlab/tensor_parallel/sequence.py"

MUTANTS = [
    Mutant(
        TENSOR,
        "return all_reduce(gradients[0].contiguous(), ctx.group), None",
        "return gradients[0].contiguous(), None",
        GPT + "megatron",
    ),
    Mutant(TENSOR, "total.add_(self.bias)", "total", GPT + "megatron"),
    Mutant(
        SEQUENCE,
        "        return reduce_scatter(gradients[0], ctx.region.scattering), None, None",
        "        rows = gradients[0].tensor_split(ctx.region.scattering.peers.world_size)\n"
        "        return rows[ctx.region.scattering.peers.rank].contiguous(), None, None",
        GPT + "sequence",
    ),
    Mutant(
        "distlab/collectives/by_hand.py",
        "add_up([parts[peer] for peer in ring], output)",
        "add_up([parts[peers.rank] for peer in ring], output)",
        GPT + "sequence",
    ),
    Mutant(
        "distlab/tensor_parallel/layers.py",
        "        probabilities[own, columns] -= gradients[0]",
        "        probabilities[own, columns] += gradients[0]",
        GPT + "megatron",
    ),
    Mutant(
        "distlab/tensor_parallel/strategy.py",
        "    enter_before(project, region)",
        "    None",
        GPT + "megatron",
    ),
    Mutant("distlab/tensor_parallel/strategy.py", "        if self.by_rows:", "        if False:", GPT + "sequence"),
]
