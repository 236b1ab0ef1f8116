"""Tasks 9 to 11: a layer in slices. Columns, rows, and a loss over a sliced vocabulary (Shoeybi et al. 2019)."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from distlab.tools.puzzle.task import FLOAT64_BYTES, Bench, Bound, Task, Tensors, all_reduce_bytes, numbers, sizes_of

BATCH, IN, OUT = 5, 13, 22
INPUTS, WEIGHT, BIAS = numbers(900, BATCH, IN), numbers(901, OUT, IN), numbers(902, OUT)
UPSTREAM = numbers(903, BATCH, OUT)  # the gradient of the outputs


def leaf(tensor: Tensor) -> Tensor:
    return tensor.clone().requires_grad_()


# Columns.


def columns(world_size: int, rank: int, tensor: Tensor, dim: int = 0) -> Tensor:
    part: Tensor = tensor.split(sizes_of(OUT, world_size), dim)[rank]
    return part


def play_column(answer: Any, bench: Bench) -> Tensors:
    x, weight = leaf(INPUTS), leaf(columns(bench.world_size, bench.rank, WEIGHT))
    with bench.measured():
        outputs = answer.column_linear(x, weight, bench.group)
        outputs.backward(columns(bench.world_size, bench.rank, UPSTREAM, 1))
    return {"outputs": outputs, "weight.grad": weight.grad, "x.grad": x.grad}


def expected_column(world_size: int) -> list[Tensors]:
    x, weight = leaf(INPUTS), leaf(WEIGHT)
    outputs = F.linear(x, weight)
    outputs.backward(UPSTREAM)
    assert x.grad is not None
    assert weight.grad is not None
    return [
        {
            "outputs": columns(world_size, rank, outputs.detach(), 1),
            "weight.grad": columns(world_size, rank, weight.grad),
            "x.grad": x.grad,
        }
        for rank in range(world_size)
    ]


def suspected_column(world_size: int) -> dict[str, list[Tensors]]:
    parts = [columns(world_size, rank, UPSTREAM, 1) @ columns(world_size, rank, WEIGHT) for rank in range(world_size)]
    return {"this rank's own part of the sum: the others' is missing": [{"x.grad": each} for each in parts]}


COLUMN = Task(
    number=9,
    name="column_linear",
    title="Column-parallel linear with backward",
    idea="""\
A linear layer y = x W^T can be cut by its outputs: every rank has all inputs and some rows of W, and computes its own
part of y, without communication. In the backward pass each rank's outputs give a part of the gradient of x, and
the whole is the sum over ranks. Autograd does not know of the other ranks. So x goes through a function that changes
nothing in the forward pass and sums over ranks in the backward pass; Megatron-LM calls it f.""",
    stub='''\
def column_linear(x: Tensor, weight: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's outputs [B, out_r] of x [B, in], which all ranks have, and its rows of the weight [out_r, in];
    out_r differs between ranks. In the backward pass x gets the gradient of all ranks' outputs."""
    ...
''',
    hints=(
        "Write a class that inherits from torch.autograd.Function, with the static methods forward and backward.",
        "forward(ctx, x, group) keeps ctx.group = group and returns x.view_as(x).",
        "backward(ctx, gradient) returns one value for each argument of forward: the summed gradient, and None.",
    ),
    allowed=frozenset({"all_reduce"}),
    limits="one all_reduce of the gradient of x, in the backward pass",
    play=play_column,
    expected=expected_column,
    suspects=suspected_column,
    bound=lambda world_size: Bound(
        rank_bytes=all_reduce_bytes(BATCH * IN * FLOAT64_BYTES, world_size), calls=1
    ),
)  # fmt: skip


# Rows.


def rows(world_size: int, rank: int, tensor: Tensor) -> Tensor:
    part: Tensor = tensor.split(sizes_of(IN, world_size), 1)[rank]
    return part.contiguous()


def play_row(answer: Any, bench: Bench) -> Tensors:
    x, weight = (leaf(rows(bench.world_size, bench.rank, each)) for each in (INPUTS, WEIGHT))
    bias = leaf(BIAS)
    with bench.measured():
        outputs = answer.row_linear(x, weight, bias, bench.group)
        outputs.backward(UPSTREAM)
    grads = {"x.grad": x.grad, "weight.grad": weight.grad, "bias.grad": bias.grad}
    return {"outputs": outputs, **grads}


def expected_row(world_size: int) -> list[Tensors]:
    x, weight, bias = leaf(INPUTS), leaf(WEIGHT), leaf(BIAS)
    outputs = F.linear(x, weight, bias)
    outputs.backward(UPSTREAM)
    assert x.grad is not None
    assert weight.grad is not None
    assert bias.grad is not None
    return [
        {
            "outputs": outputs.detach(),
            "x.grad": rows(world_size, rank, x.grad),
            "weight.grad": rows(world_size, rank, weight.grad),
            "bias.grad": bias.grad,
        }
        for rank in range(world_size)
    ]


def suspected_row(world_size: int) -> dict[str, list[Tensors]]:
    parts = [rows(world_size, rank, INPUTS) @ rows(world_size, rank, WEIGHT).T + BIAS for rank in range(world_size)]
    times = INPUTS @ WEIGHT.T + world_size * BIAS
    return {
        "this rank's own part of the sum: the others' is missing": [{"outputs": each} for each in parts],
        "the sum with the bias added once on every rank": [{"outputs": times}] * world_size,
        "without the bias": [{"outputs": INPUTS @ WEIGHT.T}] * world_size,
    }


ROW = Task(
    number=10,
    name="row_linear",
    title="Row-parallel linear with backward",
    idea="""\
The layer behind a column-parallel one is cut by its inputs: each rank has some columns of W and just the inputs that
belong to them, which are the outputs that it has computed itself. Its product has the full shape, and is one part of a
sum over ranks. So the forward pass ends with an all_reduce, and the backward pass needs none: the gradient of a sum is
the same for each of its parts. Megatron-LM calls this function g; f and g are each other's mirror. The bias is no part
of the sum: it belongs to the result once.""",
    stub='''\
def row_linear(x: Tensor, weight: Tensor, bias: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the outputs [B, out], on all ranks, of this rank's inputs x [B, in_r], its columns of the weight
    [out, in_r] and the bias [out], which all ranks have; in_r differs between ranks."""
    ...
''',
    hints=(
        "The autograd function sums over ranks in forward, and returns the gradient as it comes in backward.",
        "In forward clone before the all_reduce: an input that is changed in place has to be marked as such.",
        "Add the bias after the sum, once.",
    ),
    allowed=frozenset({"all_reduce"}),
    limits="one all_reduce of the outputs, in the forward pass",
    play=play_row,
    expected=expected_row,
    suspects=suspected_row,
    bound=lambda world_size: Bound(
        rank_bytes=all_reduce_bytes(BATCH * OUT * FLOAT64_BYTES, world_size), calls=1
    ),
)  # fmt: skip


# The loss.

TOKENS, VOCABULARY = 11, 37
LOGITS = 40 * numbers(910, TOKENS, VOCABULARY)
LOGITS[:, 3] += 700  # exp of it overflows float64, unless the largest is subtracted first
TARGETS = torch.randint(0, VOCABULARY, (TOKENS,), generator=torch.Generator().manual_seed(911))


def vocabulary(world_size: int, rank: int, tensor: Tensor) -> Tensor:
    part: Tensor = tensor.split(sizes_of(VOCABULARY, world_size), 1)[rank]
    return part.contiguous()


def play_loss(answer: Any, bench: Bench) -> Tensors:
    logits = vocabulary(bench.world_size, bench.rank, LOGITS)
    first = sum(sizes_of(VOCABULARY, bench.world_size)[: bench.rank])
    with bench.measured():
        losses, gradient = answer.cross_entropy(logits, TARGETS.clone(), first, bench.group)
    return {"losses": losses, "gradient": gradient}


def expected_loss(world_size: int) -> list[Tensors]:
    logits = leaf(LOGITS)
    losses = F.cross_entropy(logits, TARGETS, reduction="none")
    losses.sum().backward()
    assert logits.grad is not None
    return [
        {"losses": losses.detach(), "gradient": vocabulary(world_size, rank, logits.grad)} for rank in range(world_size)
    ]


def suspected_loss(world_size: int) -> dict[str, list[Tensors]]:
    sizes = sizes_of(VOCABULARY, world_size)
    clamped, own = LOGITS.logsumexp(1), []
    for rank, size in enumerate(sizes):
        logits, places = vocabulary(world_size, rank, LOGITS), TARGETS - sum(sizes[:rank])
        nearest = logits[torch.arange(TOKENS), places.clamp(0, size - 1)]
        clamped = clamped - nearest
        own.append({"losses": logits.logsumexp(1) - nearest.where((places >= 0) & (places < size), torch.tensor(0.0))})
    return {
        "the loss over this rank's part of the vocabulary alone": own,
        "a loss to which ranks that do not have the target added another logit": [{"losses": clamped}] * world_size,
    }


LOSS = Task(
    number=11,
    name="vocabulary_loss",
    title="Vocabulary-parallel cross entropy",
    idea="""\
The last layer of a language model gives a logit for each word of the vocabulary, often the largest tensor of all. Where
that layer is cut by columns, each rank has the logits of its own words. To gather them would cost as much as all layers
together. The loss is log(sum(exp(logits))) - logit of the target, and needs three numbers per token: the largest logit
of all ranks, so that exp does not overflow, the sum of exp over all ranks, and the target's logit, which one rank has.
The gradient is softmax - (1 at the target), and each rank can compute its own part without another call.""",
    stub='''\
def cross_entropy(logits: Tensor, targets: Tensor, first: int, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """Return the losses [T], on all ranks, and the gradient [T, vocabulary_r] of their sum with respect to this rank's
    logits [T, vocabulary_r], which belong to the words from `first` on. targets [T] counts over all words."""
    ...
''',
    hints=(
        "dist.all_reduce(largest, dist.ReduceOp.MAX, group=group) gives the largest logit of all ranks.",
        "A target belongs to this rank if 0 <= target - first < vocabulary_r. Others add 0 for it.",
        "The gradient is exp(logits - largest) / total, less 1 at the targets that this rank has.",
    ),
    allowed=frozenset({"all_reduce"}),
    limits="three all_reduces of one number per token",
    play=play_loss,
    expected=expected_loss,
    suspects=suspected_loss,
    bound=lambda world_size: Bound(rank_bytes=all_reduce_bytes(3 * TOKENS * FLOAT64_BYTES, world_size), calls=3),
)

TASKS = (COLUMN, ROW, LOSS)
