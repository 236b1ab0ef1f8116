"""Every primitive: what each rank holds before and after.

Each is here twice: across ranks, and as a function of all ranks' inputs in one process, the expected result.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from distlab.lab.lab import Lab
from distlab.lab.measure.tensors import larger, largest_difference
from distlab.techniques.collectives import autograd as ours
from distlab.techniques.collectives.autograd import Loss

from .checks import poisoned

ROOT = 0


@dataclass(frozen=True)
class Primitive:
    """A primitive, across ranks (`call`) and on one process (`dense`: all inputs to all outputs)."""

    name: str
    rows: bool  # the input is [N, 2], else [2]
    call: Callable[[Tensor, dist.ProcessGroup, ours.Loss], Tensor]
    dense: Callable[[list[Tensor]], list[Tensor]]
    backward: dict[str, str]  # by which ranks have the loss
    lesson: Literal[
        "own", "replicated", "both", ""
    ]  # the loss for which the lesson's table is right; "" if the table lacks the primitive

    @property
    def replicates(self) -> bool:
        """Return whether all ranks end with the same tensor: only then can a loss be replicated on it."""
        return self.backward["own"] != self.backward["replicated"]


def both(backward: str) -> dict[str, str]:
    return {"own": backward, "replicated": backward}


def on_root(x: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    return [x if rank == ROOT else x.new_empty(0) for rank in range(len(inputs))]


def everywhere(x: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    return [x] * len(inputs)


PRIMITIVES = (
    Primitive(
        "send/recv", False, lambda x, group, _: ours.send(x, group, ROOT, group.size() - 1),
        lambda xs: [xs[ROOT] if rank == len(xs) - 1 else xs[0].new_empty(0) for rank in range(len(xs))],
        both("send back"), "both",
    ),
    Primitive(
        "broadcast", False, lambda x, group, loss: ours.broadcast(x, group, ROOT, loss), lambda xs: everywhere(xs[ROOT], xs),
        {"own": "reduce to root", "replicated": "root's own"}, "own",
    ),
    Primitive(
        "scatter", True, lambda x, group, _: ours.scatter(x, group, ROOT), lambda xs: list(xs[ROOT]),
        both("gather"), "both",
    ),
    Primitive(
        "gather", False, lambda x, group, _: ours.gather(x, group, ROOT), lambda xs: on_root(torch.stack(xs), xs),
        both("scatter"), "both",
    ),
    Primitive(
        "reduce", False, lambda x, group, _: ours.reduce(x, group, ROOT), lambda xs: on_root(sum_of(xs), xs),
        both("broadcast"), "both",
    ),
    Primitive(
        "all_gather", False, ours.all_gather, lambda xs: everywhere(torch.stack(xs), xs),
        {"own": "reduce_scatter", "replicated": "slice"}, "replicated",
    ),
    Primitive(
        "all_reduce", False, ours.all_reduce, lambda xs: everywhere(sum_of(xs), xs),
        {"own": "all_reduce", "replicated": "identity"}, "own",
    ),
    Primitive(
        "all_to_all", True, lambda x, group, _: ours.all_to_all(x, group), lambda xs: list(torch.stack(xs, 1)),
        both("all_to_all"), "both",
    ),
    Primitive(
        "reduce_scatter", True, lambda x, group, _: ours.reduce_scatter(x, group), lambda xs: list(sum_of(xs)),
        both("all_gather"), "",
    ),
)  # fmt: skip


def sum_of(tensors: list[Tensor]) -> Tensor:
    return torch.stack(tensors).sum(0)


def inputs(lab: Lab, primitive: Primitive, repeat: int = 0) -> list[Tensor]:
    """Return each rank's input: rank r has 10·(r+1), 10·(r+1)+1, ..., so a number shows its origin; 100 more per
    repeat."""
    shape = (lab.world_size, 2) if primitive.rows else (2,)
    numel = 2 * lab.world_size if primitive.rows else 2
    return [
        (torch.arange(numel, dtype=torch.float64, device=lab.device) + 10 * (rank + 1) + 100 * repeat).reshape(shape)
        for rank in range(lab.world_size)
    ]


def forward(lab: Lab) -> None:
    """Log and check each rank's tensors before and after; twice, in memory that is NaN before."""
    rows = []
    for primitive in PRIMITIVES:
        lab.at(0, primitive.name)
        wrong = 0.0
        for repeat in (1, 0):
            before = inputs(lab, primitive, repeat)
            with poisoned():
                after = primitive.call(before[lab.rank], lab.group, "own")
            wrong = larger(wrong, largest_difference(after, primitive.dense(before)[lab.rank]))
        lab.check("forward", wrong, 0.0, detail=primitive.name)
        shown = lab.exchange.gather(primitive.name, text(after))
        rows += [
            [primitive.name if rank == 0 else "", rank, text(before[rank]), cells]
            for rank, cells in enumerate(shown or [])
        ]
    lab.table("The tensors of each rank", ["primitive", "rank", "before", "after"], rows)


def text(x: Tensor) -> str:
    """Return a tensor as a table cell: its numbers, of rows the first three."""
    if x.numel() == 0:
        return "-"
    numbers = [" ".join(f"{value:g}" for value in row) for row in x.reshape(-1, x.shape[-1]).tolist()]
    return " | ".join(numbers[:3]) + (" | ..." if len(numbers) > 3 else "")


# Backward passes: the gradient of each primitive, by autograd across ranks, compared with autograd in one process.
#
# There are two cases: each rank has its own loss and their sum is minimised, or all ranks compute the same loss. The
# lesson's table gives each primitive one backward and mixes the cases: its slice for all_gather is right for a
# replicated loss, its sums for broadcast and all_reduce for each rank's own. Both cases are run, so the table shows
# what each would return.

TOLERANCE = 1e-12
LOSSES: tuple[Loss, ...] = ("own", "replicated")
Convention: TypeAlias = Callable[[Primitive, Loss], Loss]  # the loss for which a primitive's backward is chosen


def as_it_is(primitive: Primitive, loss: Loss) -> Loss:  # noqa: ARG001  whatever the primitive
    """Return the loss itself: its own backward is right."""
    return loss


def backward(lab: Lab, backward_of: Convention = as_it_is) -> None:
    """Check each gradient, and show it next to that of the lesson's backward."""
    rows: list[list[object]] = []
    for primitive in PRIMITIVES:
        for loss in LOSSES if primitive.replicates else LOSSES[:1]:
            lab.at(0, f"gradient of {primitive.name}")
            true = one_process(lab, primitive, loss)
            convention = backward_of(primitive, loss)
            measured = gradient(lab, primitive, convention, loss)
            lessons = gradient(lab, primitive, loss_of_lesson(primitive, loss), loss)
            detail = f"{primitive.name}, {loss} loss, backward by {primitive.backward[convention]}"
            lab.check("gradients", largest_difference(measured, true), TOLERANCE, detail=detail)
            rows.append(table_row(primitive, loss, primitive.backward[convention], measured, true, lessons))
    lab.table("The gradient of x on rank 0", COLUMNS, rows)
    nothing_recorded(lab)


COLUMNS = ["primitive", "loss", "backward", "its result", "one process", "the lesson's backward", "the lesson's result"]


def table_row(
    primitive: Primitive, loss: Loss, backward: str, measured: Tensor, true: Tensor, lessons: Tensor
) -> list[object]:
    """Return a table row: the gradient here, the right one, and that of the lesson's backward."""
    loss_of = loss if primitive.replicates else "either"
    result = text(lessons) if largest_difference(lessons, true) <= TOLERANCE else f"WRONG: {text(lessons)}"
    lesson = [primitive.backward[loss_of_lesson(primitive, loss)], result] if primitive.lesson else ["-", "-"]
    return [primitive.name, loss_of, backward, text(measured), text(true), *lesson]


def loss_of_lesson(primitive: Primitive, loss: Loss) -> Loss:
    """Return the loss for which the lesson's backward of this primitive is right."""
    return primitive.lesson if primitive.lesson in LOSSES else loss


def loss_on(rank: int, output: Tensor, loss: Loss) -> Tensor:
    """Return a rank's loss: half the sum of w·y², with weights w = 1, 2, ..., in its own loss by rank."""
    weights = torch.arange(1, output.numel() + 1, dtype=output.dtype, device=output.device).reshape(output.shape)
    return (weights * output**2).sum() / 2 * (rank + 1 if loss == "own" else 1)


def gradient(lab: Lab, primitive: Primitive, convention: Loss, loss: Loss) -> Tensor:
    """Return x's gradient on this rank, computed across ranks with the backward for `convention`."""
    x = inputs(lab, primitive)[lab.rank].requires_grad_()
    with poisoned():
        loss_on(lab.rank, primitive.call(x, lab.group, convention), loss).backward()
    assert x.grad is not None
    return x.grad


def one_process(lab: Lab, primitive: Primitive, loss: Loss) -> Tensor:
    """Return this rank's gradient computed in one process with everyone's tensors: of all losses, or of the one."""
    xs = [x.requires_grad_() for x in inputs(lab, primitive)]
    outputs = primitive.dense(xs)
    counted = range(lab.world_size) if loss == "own" else range(1)
    total = torch.stack([loss_on(rank, outputs[rank], loss) for rank in counted]).sum()
    gradients = torch.autograd.grad(total, xs, allow_unused=True)
    mine = gradients[lab.rank]
    return mine if mine is not None else torch.zeros_like(xs[lab.rank])


def nothing_recorded(lab: Lab) -> None:
    """Check that torch.distributed records no autograd graph, although the lesson lists backwards for its calls."""
    x = torch.ones(2, device=lab.device, requires_grad=True)
    gathered = [torch.zeros(2, device=lab.device) for _ in range(lab.world_size)]
    dist.all_gather(gathered, x, group=lab.group)
    recorded = sum(part.requires_grad for part in gathered)
    detail = "outputs of torch.distributed.all_gather that autograd tracks"
    lab.check("no autograd", recorded, 0, detail=detail)
    lab.say(
        "torch.distributed.all_gather has no backward pass; those of distlab/techniques/collectives/autograd.py have"
    )
