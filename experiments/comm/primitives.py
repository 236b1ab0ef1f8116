"""Every primitive: what each rank holds before and after.

Each stands here twice: across ranks, and as a function of all ranks' inputs on one process, which says what is right.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from experiments.comm.contents import poisoned
from workers.lab import Lab
from workers.measure.difference import apart, larger
from workers.parallel import differentiable as ours

ROOT = 0


@dataclass(frozen=True)
class Primitive:
    """A primitive, across ranks (`call`) and on one process (`dense`: all inputs to all outputs)."""

    name: str
    rows: bool  # the input is [N, 2], else [2]
    call: Callable[[Tensor, dist.ProcessGroup, ours.Loss], Tensor]
    dense: Callable[[list[Tensor]], list[Tensor]]
    backward: dict[str, str]  # by whose the loss is
    lesson: Literal[
        "own", "replicated", "both", ""
    ]  # whose loss the lesson's table has in mind; "" where it has no such line

    @property
    def replicates(self) -> bool:
        """Whether all ranks end with the same tensor: only then a loss can be replicated on it."""
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
    """What each rank puts in: rank r's tensor holds 10·(r+1), 10·(r+1)+1, ..., so that one sees where a number came
    from; a hundred more in each repeat."""
    shape = (lab.world_size, 2) if primitive.rows else (2,)
    numel = 2 * lab.world_size if primitive.rows else 2
    return [
        (torch.arange(numel, dtype=torch.float64, device=lab.device) + 10 * (rank + 1) + 100 * repeat).reshape(shape)
        for rank in range(lab.world_size)
    ]


def forward(lab: Lab) -> None:
    """What each rank holds before and after, printed and checked; twice, in memory that is NaN before it is written."""
    rows, control = [], "tests/experiments/test_comm.py::test_a_wrong_primitive_is_seen"
    for primitive in PRIMITIVES:
        lab.at(0, primitive.name)
        wrong = 0.0
        for repeat in (1, 0):
            before = inputs(lab, primitive, repeat)
            with poisoned():
                after = primitive.call(before[lab.rank], lab.group, "own")
            wrong = larger(wrong, apart(after, primitive.dense(before)[lab.rank]))
        lab.check("forward", wrong, 0.0, detail=primitive.name, control=control)
        shown = lab.exchange.gather(primitive.name, text(after))
        rows += [
            [primitive.name if rank == 0 else "", rank, text(before[rank]), held]
            for rank, held in enumerate(shown or [])
        ]
    lab.table("What each rank holds", ["primitive", "rank", "before", "after"], rows)


def text(x: Tensor) -> str:
    """A tensor as a cell of a table: its numbers, of rows the first three."""
    if x.numel() == 0:
        return "-"
    numbers = [" ".join(f"{value:g}" for value in row) for row in x.reshape(-1, x.shape[-1]).tolist()]
    return " | ".join(numbers[:3]) + (" | ..." if len(numbers) > 3 else "")
