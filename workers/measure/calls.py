"""The calls: a dispatch mode that sees every collective and every send while it is on.

PyTorch hands each c10d call through its dispatcher, so a TorchDispatchMode sees it whoever made it: the lesson, a
gradient hook in the backward pass, DDP's reducer in C++, fully_shard, DTensor, a functional collective. Called bytes
are what the best algorithm sends of the whole tensor (`sent_bytes`; `given_bytes` of an all_to_all), worked out here
and not by formulas/: what is predicted is held against them exactly, so neither may come from the other. Barriers and
receives send nothing of their own, and are not counted.

A mode belongs to a thread: a call from a thread that the lesson started itself is not seen. On the CPU the backward
pass runs on the caller's thread; on CUDA autograd hands its threads the mode (at::ThreadLocalState), as the sources
say: not measured.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

# Schema name -> the operation, and which argument is (or lists) the whole tensor; RESULT: it is what the call returns.
RESULT = -1
OPERATIONS = {
    "c10d::allreduce_": ("all_reduce", 0),
    "c10d::allreduce_coalesced_": ("all_reduce", 0),
    "c10d::broadcast_": ("broadcast", 0),
    "c10d::reduce_": ("reduce", 0),
    "c10d::allgather_": ("all_gather", 0),
    "c10d::allgather_coalesced_": ("all_gather", 0),
    "c10d::allgather_into_tensor_coalesced_": ("all_gather", 0),
    "c10d::_allgather_base_": ("all_gather", 0),
    "c10d::reduce_scatter_": ("reduce_scatter", 1),
    "c10d::reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
    "c10d::_reduce_scatter_base_": ("reduce_scatter", 1),
    "c10d::alltoall_": ("all_to_all", 1),
    "c10d::alltoall_base_": ("all_to_all", 1),
    "c10d::scatter_": ("scatter", 1),
    "c10d::gather_": ("gather", 1),
    "c10d::send": ("send", 0),
    "_c10d_functional::all_reduce": ("all_reduce", 0),
    "_c10d_functional::all_reduce_": ("all_reduce", 0),
    "_c10d_functional::all_reduce_coalesced": ("all_reduce", 0),
    "_c10d_functional::all_reduce_coalesced_": ("all_reduce", 0),
    "_c10d_functional::broadcast": ("broadcast", 0),
    "_c10d_functional::broadcast_": ("broadcast", 0),
    "_c10d_functional::all_gather_into_tensor": ("all_gather", RESULT),
    "_c10d_functional::all_gather_into_tensor_out": ("all_gather", RESULT),
    "_c10d_functional::all_gather_into_tensor_coalesced": ("all_gather", RESULT),
    "_c10d_functional::reduce_scatter_tensor": ("reduce_scatter", 0),
    "_c10d_functional::reduce_scatter_tensor_out": ("reduce_scatter", 0),
    "_c10d_functional::reduce_scatter_tensor_coalesced": ("reduce_scatter", 0),
    "_c10d_functional::all_to_all_single": ("all_to_all", 0),
    "_c10d_functional::isend": ("send", 0),
}


@dataclass
class CalledOp:
    """All calls of one operation on one axis. `raw_bytes` are the tensors', `called_bytes` what they must send."""

    op: str
    axis: str  # the mesh axis ("dp"), "world", or the group's own name
    calls: float = 0
    raw_bytes: float = 0
    called_bytes: float = 0.0


class Calls(TorchDispatchMode):
    """`with Calls() as calls: ...` then `calls.ops()`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._ops: dict[tuple[str, str], CalledOp] = {}

    def ops(self) -> list[CalledOp]:
        """What was called so far, by operation and axis in the order of their first call."""
        return list(self._ops.values())

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: torch would import its compiler for this class, 822 modules, to leave out what nobody compiles here."""
        return False

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a DTensor first turns into plain tensors and the collectives that it needs
        result = func(*args, **(kwargs or {}))
        name = func._schema.name  # type: ignore[attr-defined]
        if name in OPERATIONS:
            op, position = OPERATIONS[name]
            self._count(op, nbytes_of(result if position == RESULT else args[position]), name, args)
        return result

    def _count(self, op: str, raw_bytes: int, name: str, args: tuple[Any, ...]) -> None:
        group = _group(args)
        if op == "gather":  # the argument is this rank's part; all send theirs but the root, args[3]
            called_bytes = float(raw_bytes if args[3] != group.rank() else 0)
        elif op == "all_to_all":
            called_bytes = given_bytes(name, args, group)
        else:
            called_bytes = sent_bytes(op, raw_bytes, group.size())
        entry = self._ops.setdefault((op, axis_of(group)), CalledOp(op, axis_of(group)))
        entry.calls += 1
        entry.raw_bytes += raw_bytes
        entry.called_bytes += called_bytes


def sent_bytes(op: str, nbytes: int, group_size: int) -> float:
    """What a rank sends of a tensor of `nbytes` in all: to a peer all of it, to the others all but its own Nth.

    An all_reduce sends the parts once to be summed, and once as sums. Where ranks differ (broadcast, reduce, scatter)
    it is their mean.
    """
    if op == "send":
        return float(nbytes)
    others = nbytes - nbytes / group_size
    return 2 * others if op == "all_reduce" else others


# Schema name of an all_to_all -> which argument is what this rank gives, and which the rows of it to each other one.
GIVEN = {"c10d::alltoall_base_": (1, 4), "_c10d_functional::all_to_all_single": (0, 2)}


def given_bytes(name: str, args: tuple[Any, ...], group: dist.ProcessGroup) -> float:
    """What a rank sends in an all_to_all, whose parts may be uneven: all but what it keeps."""
    if name not in GIVEN:  # a list of parts
        return float(nbytes_of(args[1]) - nbytes_of(args[1][group.rank()]))
    tensor, rows = (args[position] for position in GIVEN[name])
    if not rows:  # equal parts
        return sent_bytes("all_to_all", nbytes_of(tensor), group.size())
    whole = float(nbytes_of(tensor))
    kept: float = whole * rows[group.rank()] / max(1, sum(rows))
    return whole - kept


def axis_of(group: dist.ProcessGroup) -> str:
    """The mesh axis that a group belongs to, "world" for the default group, or the description it was made with."""
    description = group.group_desc
    if description == "default_pg":
        return "world"
    return group.group_name if description in ("", "undefined") else description.removeprefix("mesh_")


def _group(args: tuple[Any, ...]) -> dist.ProcessGroup:
    """The process group of a call: the first boxed object of a c10d call, the last argument of a functional
    collective."""
    boxed = [value for value in args if isinstance(value, torch.ScriptObject)]
    return dist.ProcessGroup.unbox(boxed[0]) if boxed else dist.distributed_c10d._resolve_process_group(args[-1])


def nbytes_of(tensors: Any) -> int:
    """Bytes of a tensor, or of all tensors in lists of lists."""
    if isinstance(tensors, torch.Tensor):
        return tensors.numel() * tensors.element_size()
    return sum(map(nbytes_of, tensors))
