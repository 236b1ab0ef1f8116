"""What comes back: the gradient of each primitive, by autograd across ranks, against autograd on one process.

Twice where it matters: each rank has its own loss and their sum is minimised, or all ranks compute one and the same
loss. The lesson's table gives each primitive one backward and mixes the two: its slice for all_gather is right for a
replicated loss, its sums for broadcast and all_reduce for each rank's own. Both ways are run, so the table shows what
each would give.
"""

from collections.abc import Callable
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from experiments.comm.contents import poisoned
from experiments.comm.primitives import PRIMITIVES, Primitive, inputs, text
from workers.lab import Lab
from workers.measure.difference import apart
from workers.parallel.differentiable import Loss

TOLERANCE = 1e-12
LOSSES: tuple[Loss, ...] = ("own", "replicated")
Convention: TypeAlias = Callable[[Primitive, Loss], Loss]  # for whose loss a primitive's backward is taken


def as_it_is(primitive: Primitive, loss: Loss) -> Loss:  # noqa: ARG001  whatever the primitive
    """The loss itself: its own backward is right."""
    return loss


def backward(lab: Lab, backward_of: Convention = as_it_is) -> None:
    """Check each gradient, and show it beside what the lesson's backward gives."""
    rows: list[list[object]] = []
    for primitive in PRIMITIVES:
        for loss in LOSSES if primitive.replicates else LOSSES[:1]:
            lab.at(0, f"gradient of {primitive.name}")
            true = one_process(lab, primitive, loss)
            taken = backward_of(primitive, loss)
            measured = gradient(lab, primitive, taken, loss)
            lessons = gradient(lab, primitive, loss_of_lesson(primitive, loss), loss)
            detail = f"{primitive.name}, {loss} loss, backward by {primitive.backward[taken]}"
            lab.check("gradients", apart(measured, true), TOLERANCE, detail=detail)
            rows.append(row(primitive, loss, primitive.backward[taken], measured, true, lessons))
    lab.table("What comes back to rank 0: the gradient of x", COLUMNS, rows)
    nothing_recorded(lab)


COLUMNS = ["primitive", "loss", "backward", "it gives", "one process", "the lesson's backward", "that gives"]


def row(
    primitive: Primitive, loss: Loss, backward: str, measured: Tensor, true: Tensor, lessons: Tensor
) -> list[object]:
    """A line of the table: what went back here, what is right, and what the lesson's backward would give."""
    whose = loss if primitive.replicates else "either"
    gives = text(lessons) if apart(lessons, true) <= TOLERANCE else f"WRONG: {text(lessons)}"
    lesson = [primitive.backward[loss_of_lesson(primitive, loss)], gives] if primitive.lesson else ["-", "-"]
    return [primitive.name, whose, backward, text(measured), text(true), *lesson]


def loss_of_lesson(primitive: Primitive, loss: Loss) -> Loss:
    """The loss for which the lesson's backward of this primitive is right, whatever the loss is."""
    return primitive.lesson if primitive.lesson in LOSSES else loss


def loss_on(rank: int, output: Tensor, loss: Loss) -> Tensor:
    """A rank's loss: half the sum of w·y², with weights w = 1, 2, ... that grow with the rank where the loss is its
    own."""
    weights = torch.arange(1, output.numel() + 1, dtype=output.dtype, device=output.device).reshape(output.shape)
    return (weights * output**2).sum() / 2 * (rank + 1 if loss == "own" else 1)


def gradient(lab: Lab, primitive: Primitive, convention: Loss, loss: Loss) -> Tensor:
    """x's gradient on this rank, across ranks, with the backward that `convention` wants."""
    x = inputs(lab, primitive)[lab.rank].requires_grad_()
    with poisoned():
        loss_on(lab.rank, primitive.call(x, lab.group, convention), loss).backward()
    assert x.grad is not None
    return x.grad


def one_process(lab: Lab, primitive: Primitive, loss: Loss) -> Tensor:
    """The gradient of this rank's x, by one process that holds everyone's: of all losses, or of the one."""
    xs = [x.requires_grad_() for x in inputs(lab, primitive)]
    outputs = primitive.dense(xs)
    counted = range(lab.world_size) if loss == "own" else range(1)
    total = torch.stack([loss_on(rank, outputs[rank], loss) for rank in counted]).sum()
    gradients = torch.autograd.grad(total, xs, allow_unused=True)
    mine = gradients[lab.rank]
    return mine if mine is not None else torch.zeros_like(xs[lab.rank])


def nothing_recorded(lab: Lab) -> None:
    """The lesson says that autograd computes the backward of these calls by itself; torch.distributed records
    nothing."""
    x = torch.ones(2, device=lab.device, requires_grad=True)
    gathered = [torch.zeros(2, device=lab.device) for _ in range(lab.world_size)]
    dist.all_gather(gathered, x, group=lab.group)
    recorded = sum(part.requires_grad for part in gathered)
    detail = "outputs of torch.distributed.all_gather that autograd knows of"
    control = "tests/experiments/test_comm.py::test_a_gather_that_autograd_knows_is_seen"
    lab.check("no autograd", recorded, 0, detail=detail, control=control)
    lab.say(
        "torch.distributed.all_gather leaves autograd nothing to send back: workers/parallel/differentiable.py does"
    )
