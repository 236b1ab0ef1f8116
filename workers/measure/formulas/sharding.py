"""ZeRO: what N ranks send for S bytes of parameters, and what stands in memory between two steps (Rajbhandari et al.
2020).

The bytes of a step are of its section 7, those of memory of section 3.1 and figure 1, P being the number of parameters.
"""

from workers.measure.formulas.collectives import algorithmic_factor

# Adam in mixed precision, bytes a parameter, in float32 but for the first two. "Four times the half-precision weights",
# 56 GB for 7 billion, forgets what the optimizer keeps.
MIXED_PRECISION = {"weights": 2, "gradients": 2, "master weights": 4, "first moments": 4, "second moments": 4}

# Layers whose weights or gradients are whole at once in zero3's backward pass: the one that computes and the one that
# is gathered ahead, the gradients that are summed, and what the other ranks send for that sum.
WHOLE_LAYERS = 4


def zero_bytes(stage: int, world_size: int, nbytes: float, microbatches: int = 1, gathers: int = 2) -> float:
    """What a rank sends in a step for parameters of `nbytes`: each sum and each gather of them is (N-1)/N·S.

    Stage 1 sums and gathers once. Stage 2 sums after each microbatch, since it keeps no gradients: (M+1)(N-1)/N·S.
    Stage 3 gathers for each, too, forward and backward, or in one of `gathers` if the weights stay: 3M(N-1)/N·S or
    2M(N-1)/N·S.
    """
    moves = {1: 2, 2: microbatches + 1, 3: microbatches * (gathers + 1)}[stage]
    return moves * algorithmic_factor("all_gather", world_size) * nbytes


def fully_shard_bytes(world_size: int, nbytes: float, microbatches: int, gathers: int, backend: str) -> float:
    """The same for PyTorch's fully_shard. gloo's reduce_scatter is an all_reduce: 4(N-1)/N·S, where NCCL sends
    3(N-1)/N·S."""
    sums = 2 if backend == "gloo" else 1
    return microbatches * (gathers + sums) * algorithmic_factor("all_gather", world_size) * nbytes


def mixed_precision_bytes(num_parameters: float) -> float:
    """2 + 2 + 4 + 4 + 4 = 16 bytes a parameter: 112 GB for 7 billion, before the first activation."""
    return sum(MIXED_PRECISION.values()) * num_parameters


def rest_bytes(
    stage: int, num_parameters: float, held: float, *, itemsize: int = 4, moments: int = 2, masters: bool = False,
    num_tensors: int = 0, gradient_itemsize: int | None = None,
) -> dict[str, float]:  # fmt: skip
    """Bytes of weights, gradients and optimizer state on one rank, by class; `held` parameters are its own, P/N if
    shards are even.

    stage 0 keeps all, 1 shards the optimizer's state, 2 the gradients too, 3 the weights too. In float32 with Adam's
    two `moments` 16P, (8+8/N)P, (4+12/N)P, 16P/N. With `masters` weights and gradients are of `itemsize` and the
    optimizer keeps the weights and its moments in float32: in half precision (4+12)P, (4+12/N)P, (2+14/N)P, 16P/N. SGD
    has no moments. torch's AdamW counts its steps once a tensor that it steps: 4 bytes for each of `num_tensors`.
    `gradient_itemsize` is a gradient's where it is no weight's: Megatron-LM sums gradients of bf16 weights in float32,
    18 bytes a parameter, 6+12/N with its distributed optimizer (NVIDIA's documentation of it, table of memory).
    """
    weights, gradients, stepped = (held if stage >= first else num_parameters for first in (3, 2, 1))
    remembered = moments * (4 if masters else itemsize) + (4 if masters else 0)
    return {
        "parameters": itemsize * weights,
        "gradients": (gradient_itemsize or itemsize) * gradients,
        "optimizer": remembered * stepped + 4 * num_tensors,
    }
