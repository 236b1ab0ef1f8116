"""Tensor parallelism: what stands at the ends of a slice, and what is summed over the ranks."""

from benchmarks.mutants import Mutant

GPT = "RUN_MODE=tp LAB_DEPTH=1 LAB_WIDTH=16 LAB_HEADS=4 LAB_SEQ=8 LAB_VARIANT="
TENSOR = "distlab/tensor_parallel/layers.py"

MUTANTS = [
    Mutant(
        TENSOR,
        "return all_reduce(gradients[0].contiguous(), ctx.group), None",
        "return gradients[0].contiguous(), None",
        GPT + "megatron",
    ),
    Mutant(TENSOR, "total.add_(self.bias)", "total", GPT + "megatron"),
    Mutant(
        TENSOR,
        "lambda gradient: reduce_scatter(gradient, self.scattering)",
        "lambda gradient: self.own(gradient).contiguous()",
        GPT + "sequence",
    ),
    Mutant(
        "distlab/collectives/by_hand.py",
        "add_up([parts[peer] for peer in ring], output)",
        "add_up([parts[peers.rank] for peer in ring], output)",
        GPT + "sequence",
    ),
    Mutant(
        TENSOR,
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
