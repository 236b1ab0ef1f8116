"""Tasks 7 and 8: when gradients are summed. During the backward pass, and once for several microbatches."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from distlab.tools.puzzle.task import (
    FLOAT64_BYTES,
    Bench,
    Bound,
    Report,
    Task,
    Tensors,
    all_reduce_bytes,
    numbers,
    sizes_of,
)

WIDTH, DEPTH = 7, 4
BATCH = 29
BUCKET_BYTES = 500  # a layer has 7 * 7 + 7 numbers, 448 bytes


def model() -> nn.Sequential:
    made = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(DEPTH)))
    with torch.no_grad():
        for place, parameter in enumerate(made.parameters()):
            parameter.copy_(numbers(700 + place, *parameter.shape) / 3)
    return made


NUMBERS = DEPTH * (WIDTH * WIDTH + WIDTH)


def samples(rank: int, world_size: int) -> tuple[Tensor, Tensor]:
    """Return a rank's inputs and targets [its part of the batch, width]."""
    sizes = sizes_of(BATCH, world_size)
    inputs, targets = numbers(750, BATCH, WIDTH).split(sizes)[rank], numbers(751, BATCH, WIDTH).split(sizes)[rank]
    return inputs, targets


def loss(layers: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Return the sum over the samples."""
    summed: Tensor = ((layers(inputs).tanh() - targets) ** 2).sum()
    return summed


def gradients(layers: nn.Module) -> Tensors:
    return {name: each.grad for name, each in layers.named_parameters()}  # type: ignore[misc]


def gradients_by_rank(world_size: int) -> list[Tensors]:
    """Return the gradients of each rank's own sum."""
    found = []
    for rank in range(world_size):
        layers = model()
        loss(layers, *samples(rank, world_size)).backward()
        found.append(gradients(layers))
    return found


def combined(parts: Sequence[Tensors], factor: float) -> Tensors:
    return {name: factor * torch.stack([part[name] for part in parts]).sum(0) for name in parts[0]}


# Buckets.


def play_hooks(answer: Any, bench: Bench) -> Tensors:
    layers = model()
    inputs, targets = samples(bench.rank, bench.world_size)

    def note(gradient: Tensor) -> None:  # noqa: ARG001
        bench.note("before the first layer", bench.num_calls())

    def after_first(module: nn.Module, inputs: object, output: Tensor) -> None:  # noqa: ARG001
        output.register_hook(note)

    layers[0].register_forward_hook(after_first)
    with bench.measured():
        finish = answer.attach(layers, BUCKET_BYTES, bench.group)
        loss(layers, inputs, targets).backward()
        bench.note("after the backward pass", bench.num_calls())
        finish()
    return gradients(layers)


def expected_hooks(world_size: int) -> list[Tensors]:
    return [combined(gradients_by_rank(world_size), 1 / world_size)] * world_size


def suspected_hooks(world_size: int) -> dict[str, list[Tensors]]:
    own = gradients_by_rank(world_size)
    return {
        "this rank's own gradient, which was never averaged": own,
        "the sum, not the mean": [combined(own, 1.0)] * world_size,
    }


def overlaps(world_size: int, reports: Sequence[Report]) -> str:
    """Check that calls are launched during the backward pass, and nothing waits in it."""
    for rank, report in enumerate(reports):
        waiting = [each for each in report.calls[: report.seen["after the backward pass"]] if each.waits]
        if waiting:
            at = f"{waiting[0].op} at {waiting[0].line} on rank {rank}"
            return f"the backward pass waits for {at}: launch it with async_op=True"
        if world_size > 1 and not report.seen["before the first layer"]:
            return f"no all_reduce was launched before the backward pass reached the first layer on rank {rank}"
    return ""


HOOKS = Task(
    number=7,
    name="hooks",
    title="Buckets launched from hooks",
    idea="""\
The backward pass computes the gradients of the last layer first. While it goes on to the layers before, the network
could send those that are ready: that is the overlap that makes data parallelism cheap (Li et al. 2020, section 3.2).
A hook on each parameter is called once its gradient is there. It puts the gradient into the open bucket, and a bucket
that has at least bucket_bytes is launched: one all_reduce, without waiting for it. After the backward pass `finish`
launches the rest, waits for all, and writes the means back. The loss is a sum over a rank's samples; the mean
wanted here is over ranks.""",
    stub='''\
def attach(model: torch.nn.Module, bucket_bytes: int, group: dist.ProcessGroup) -> Callable[[], None]:
    """Put hooks on the model's parameters (float64). Return `finish`, which is called after the backward pass: then
    each parameter's grad is the mean over the ranks."""
    ...
''',
    hints=(
        "parameter.register_post_accumulate_grad_hook(hook) calls hook(parameter) once parameter.grad is written.",
        "dist.all_reduce(flat, group=group, async_op=True) returns a handle at once; handle.wait() waits.",
        "Keep handle, flat tensor and parameters of each bucket in a list for `finish`; empty the bucket on launch.",
        "The last bucket is not full. Who launches it?",
    ),
    allowed=frozenset({"all_reduce"}),
    limits=(
        "one all_reduce for each bucket of at least bucket_bytes, and one for the rest; the first is launched before"
        " the gradients of the first layer are computed, and the backward pass waits for none"
    ),
    play=play_hooks,
    expected=expected_hooks,
    suspects=suspected_hooks,
    inspect=overlaps,
    bound=lambda world_size: Bound(
        rank_bytes=all_reduce_bytes(NUMBERS * FLOAT64_BYTES, world_size),
        calls=math.ceil(NUMBERS * FLOAT64_BYTES / BUCKET_BYTES),
    ),
)


# Accumulation.


def microbatches(rank: int, world_size: int) -> list[tuple[Tensor, Tensor]]:
    """Return three per rank, of uneven sizes."""
    inputs, targets = samples(rank, world_size)
    sizes = sizes_of(len(inputs), 3)
    return list(zip(inputs.split(sizes), targets.split(sizes), strict=True))


def play_accumulate(answer: Any, bench: Bench) -> Tensors:
    layers = model()
    batches = microbatches(bench.rank, bench.world_size)
    with bench.measured():
        answer.accumulate(layers, loss, batches, BATCH, bench.group)
    return gradients(layers)


def suspected_accumulate(world_size: int) -> dict[str, list[Tensors]]:
    own = gradients_by_rank(world_size)
    # Summed over ranks after each microbatch, the former sums with it
    layers = model()
    total: Tensors = {name: torch.zeros_like(each) for name, each in layers.named_parameters()}
    for place in range(3):
        parts = []
        for rank in range(world_size):
            layers = model()
            loss(layers, *microbatches(rank, world_size)[place]).backward()
            parts.append(gradients(layers))
        added = combined(parts, 1 / BATCH)
        total = {name: world_size * total[name] + added[name] for name in total}
    doubled = [total] * world_size
    return {
        "this rank's own gradient, without the others'": [combined([each], 1 / BATCH) for each in own],
        "the sum over samples, not the mean": [combined(own, 1.0)] * world_size,
        "a sum in which the earlier microbatches were summed over ranks again with each later one": doubled,
        "divided by the number of ranks as well": [combined(own, 1 / BATCH / world_size)] * world_size,
    }  # fmt: skip


ACCUMULATE = Task(
    number=8,
    name="accumulation",
    title="Gradient accumulation with one sync",
    idea="""\
A batch that does not fit into memory is cut into microbatches, whose gradients add up in parameter.grad. The ranks need
the sum of all of them once, at the end: a sync after each microbatch sends several times as much, and what was summed
over ranks already would be summed again (DDP has no_sync for this). The loss given here is a sum over samples, so that
uneven microbatches need no weights. Divide by the number of samples of all ranks.""",
    stub='''\
def accumulate(
    model: torch.nn.Module,
    loss: Callable[[torch.nn.Module, Tensor, Tensor], Tensor],
    microbatches: list[tuple[Tensor, Tensor]],
    num_samples: int,
    group: dist.ProcessGroup,
) -> None:
    """Leave in each parameter's grad the gradient of the mean loss over the num_samples samples of all ranks.
    loss(model, inputs, targets) is the sum over the samples of a microbatch, inputs and targets are [B, 7]."""
    ...
''',
    hints=(
        "backward() adds to grad, so nothing is needed between microbatches.",
        "One all_reduce per parameter after the last microbatch is enough, or one of all in a flat bucket.",
    ),
    allowed=frozenset({"all_reduce"}),
    limits="2 (N - 1) / N of the gradients are sent, in at most one all_reduce per parameter",
    play=play_accumulate,
    expected=lambda world_size: [combined(gradients_by_rank(world_size), 1 / BATCH)] * world_size,
    suspects=suspected_accumulate,
    bound=lambda world_size: Bound(
        rank_bytes=all_reduce_bytes(NUMBERS * FLOAT64_BYTES, world_size), calls=2 * DEPTH
    ),
)  # fmt: skip

TASKS = (HOOKS, ACCUMULATE)
