"""Tasks 14 and 15: each rank keeps a part. Of the optimizer's state (ZeRO-1), and of the weights too (ZeRO-3)."""

from typing import Any

import torch
from torch import Tensor

from distlab.tools.puzzle.task import FLOAT64_BYTES, Bench, Bound, Task, Tensors, all_reduce_bytes, numbers

# ZeRO-1.

SIZE, STEPS, LR, BETA = 1003, 3, 0.1, 0.9


def shard_size(total: int, world_size: int) -> int:
    """Return a shard's size; the last has fewer numbers and is padded."""
    return -(-total // world_size)


def real(rank: int, world_size: int, tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, without padding."""
    part: Tensor = tensor.split(shard_size(SIZE, world_size))[rank]
    return part


def gradient_of(rank: int, step: int, weights: Tensor) -> Tensor:
    """Return a gradient that shows wrong weights in the next step."""
    return numbers(1400 + 10 * step + rank, SIZE) + 0.5 * weights


def play_zero1(answer: Any, bench: Bench) -> Tensors:
    weights = numbers(1490, SIZE)
    momentum = torch.zeros(shard_size(SIZE, bench.world_size), dtype=torch.float64)
    with bench.measured():
        for step in range(STEPS):
            gradient = gradient_of(bench.rank, step, weights)
            answer.zero1_step(weights, gradient, momentum, LR, bench.group)
    return {"momentum": momentum[: len(real(bench.rank, bench.world_size, weights))], "weights": weights}


def sgd(world_size: int, factor: float) -> list[Tensors]:
    """Train in one process; its gradient is the ranks' sum times `factor`."""
    weights, momentum = numbers(1490, SIZE), torch.zeros(SIZE, dtype=torch.float64)
    for step in range(STEPS):
        gradient = factor * torch.stack([gradient_of(rank, step, weights) for rank in range(world_size)]).sum(0)
        momentum = BETA * momentum + gradient
        weights = weights - LR * momentum
    return [{"momentum": real(rank, world_size, momentum), "weights": weights} for rank in range(world_size)]


def suspected_zero1(world_size: int) -> dict[str, list[Tensors]]:
    own = []
    for rank in range(world_size):  # only this rank's own gradient is used
        weights, momentum = numbers(1490, SIZE), torch.zeros(SIZE, dtype=torch.float64)
        for step in range(STEPS):
            momentum = BETA * momentum + gradient_of(rank, step, weights)
            weights = weights - LR * momentum
        own.append({"weights": weights})
    return {
        "what sums in the place of means give": sgd(world_size, 1.0),
        "training with its own gradients alone": own,
        "what comes out if each rank keeps old weights of the others": without_gathering(world_size),
    }


def without_gathering(world_size: int) -> list[Tensors]:
    """Update only the own part of the weights on each rank."""
    weights = [numbers(1490, SIZE) for _ in range(world_size)]
    momentum = [torch.zeros_like(real(rank, world_size, each)) for rank, each in enumerate(weights)]
    for step in range(STEPS):
        mean = torch.stack([gradient_of(rank, step, each) for rank, each in enumerate(weights)]).mean(0)
        for rank in range(world_size):
            momentum[rank] = BETA * momentum[rank] + real(rank, world_size, mean)
            real(rank, world_size, weights[rank]).sub_(LR * momentum[rank])
    return [{"momentum": momentum[rank], "weights": weights[rank]} for rank in range(world_size)]


ZERO1 = Task(
    number=14,
    name="zero1",
    title="ZeRO-1: each rank keeps a part of the optimizer's state",
    idea="""\
In data parallelism all ranks keep the same optimizer state: with Adam two numbers per weight, N times. ZeRO-1
(Rajbhandari et al. 2020, section 5.1) gives each rank a part of it. Each rank needs the mean gradient of its own part
alone, a reduce_scatter, updates its part of the weights, and an all_gather gives all ranks the new weights. An
all_reduce is these two steps, so the bytes are the same. The optimizer here is SGD with momentum: momentum = 0.9 *
momentum + gradient, weights = weights - lr * momentum. 1003 weights do not divide: pad to N equal shards.""",
    stub='''\
def zero1_step(weights: Tensor, gradient: Tensor, momentum: Tensor, lr: float, group: dist.ProcessGroup) -> None:
    """Do a step in place. weights [1003] are the same on all ranks, gradient [1003] is this rank's, momentum
    [ceil(1003 / N)] is this rank's shard: rank r has weights r * len(momentum) and on, the last rank's end is padding.
    """
    ...
''',
    hints=(
        "torch.nn.functional.pad(gradient, (0, missing)) makes it N * len(momentum) long.",
        "dist.reduce_scatter_tensor(shard, padded, group=group) gives the sum; what is wanted is the mean.",
        "dist.all_gather_into_tensor(padded_weights, updated_shard, group=group), then copy all but the padding.",
    ),
    allowed=frozenset({"reduce_scatter", "all_gather", "all_reduce"}),
    limits="2 (N - 1) / N of the padded weights are sent in a step, in two calls",
    play=play_zero1,
    expected=lambda world_size: sgd(world_size, 1 / world_size),
    suspects=suspected_zero1,
    bound=lambda world_size: Bound(
        rank_bytes=STEPS * all_reduce_bytes(world_size * shard_size(SIZE, world_size) * FLOAT64_BYTES, world_size),
        calls=2 * STEPS,
    ),
)


# ZeRO-3.

WIDTH, DEPTH, BATCH = 37, 8, 5
LAYER = WIDTH * WIDTH


def weights_of(layer: int) -> Tensor:
    return numbers(1500 + layer, WIDTH, WIDTH) / 6


def inputs_of(rank: int) -> Tensor:
    return numbers(1550 + rank, BATCH + rank, WIDTH)


def sharded(flat: Tensor, world_size: int) -> list[Tensor]:
    size = shard_size(LAYER, world_size)
    padded = torch.nn.functional.pad(flat, (0, world_size * size - LAYER))
    return list(padded.split(size))


def play_zero3(answer: Any, bench: Bench) -> Tensors:
    shards = [sharded(weights_of(layer).reshape(-1), bench.world_size)[bench.rank].clone() for layer in range(DEPTH)]
    x = inputs_of(bench.rank)
    with bench.measured():
        gradients = answer.zero3_step(shards, WIDTH, x, bench.group)
    return {f"gradient {layer}": gradients[layer] for layer in range(DEPTH)}


def gradients_of(world_size: int) -> list[list[Tensor]]:
    """Return the gradients of each rank's own loss, by layer."""
    found = []
    for rank in range(world_size):
        layers = [weights_of(layer).requires_grad_() for layer in range(DEPTH)]
        hidden = inputs_of(rank)
        for weight in layers:
            hidden = torch.tanh(hidden @ weight.T)
        (hidden**2).sum().div(2).backward()
        found.append([each.grad.reshape(-1) for each in layers if each.grad is not None])
    return found


def expected_zero3(world_size: int) -> list[Tensors]:
    parts = gradients_of(world_size)
    totals = [torch.stack([part[layer] for part in parts]).sum(0) for layer in range(DEPTH)]
    return [
        {f"gradient {layer}": sharded(total, world_size)[rank] for layer, total in enumerate(totals)}
        for rank in range(world_size)
    ]


def suspected_zero3(world_size: int) -> dict[str, list[Tensors]]:
    own = [
        {f"gradient {layer}": sharded(each, world_size)[rank] for layer, each in enumerate(part)}
        for rank, part in enumerate(gradients_of(world_size))
    ]
    return {"of this rank's own samples alone": own}


def bound_zero3(world_size: int) -> Bound:
    padded = world_size * shard_size(LAYER, world_size) * FLOAT64_BYTES
    activations = (BATCH + world_size - 1) * WIDTH * FLOAT64_BYTES
    return Bound(
        rank_bytes=DEPTH * 1.5 * all_reduce_bytes(padded, world_size),
        calls=3 * DEPTH,
        peak_bytes=2 * DEPTH * padded / world_size + 4 * padded + (DEPTH + 5) * activations,
    )


ZERO3 = Task(
    number=15,
    name="zero3",
    title="ZeRO-3: weights gathered just in time",
    idea="""\
ZeRO-3 (Rajbhandari et al. 2020, section 5.3; FSDP) shards the weights, too: a rank keeps 1 / N of each layer. Before a
layer is used, in the forward pass and again in the backward pass, all ranks gather it, use it and free it. Its gradient
is summed by a reduce_scatter at once, so that each rank keeps 1 / N of that as well. That is 1.5 times the bytes of
data parallelism, and the memory of one or two whole layers and not of all. The model here is hidden = tanh(hidden @
W.T), layer by layer, and the loss of a rank is (hidden ** 2).sum() / 2. With `after` and `before` of a layer and the
gradient of `after`: g = gradient * (1 - after ** 2), W.grad = g.T @ before, before.grad = g @ W.""",
    stub='''\
def zero3_step(shards: list[Tensor], width: int, x: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    """Return this rank's shard of the gradient of the sum of all ranks' losses, for each layer. A layer's weight is
    [width, width], flat and padded to N shards of the same size; shards has this rank's, one per layer, float64. x
    [B, width] are this rank's samples, B differs between ranks. No weight is kept longer than it is used."""
    ...
''',
    hints=(
        "Write gather(shard): all_gather_into_tensor into an empty tensor of N * len(shard), cut to a layer.",
        "Keep the activations of the forward pass in a list, and no weight. The first gradient is hidden itself.",
        "Pad g.T @ before to N shards and reduce_scatter_tensor it into torch.empty_like(shard).",
        "What a local name still refers to is not free: gather(shard) inside an expression is freed at once.",
    ),
    allowed=frozenset({"reduce_scatter", "all_gather"}),
    limits=(
        "1.5 times the bytes of an all_reduce of all weights, in three calls per layer; of tensors at one time: all"
        " shards and their gradients, four whole layers, and the activations"
    ),
    play=play_zero3,
    expected=expected_zero3,
    suspects=suspected_zero3,
    bound=bound_zero3,
)

TASKS = (ZERO1, ZERO3)
