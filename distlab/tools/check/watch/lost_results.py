"""What a collective gives and nobody can use: the result in a temporary, the gradient of what was gathered.

`dist.all_reduce(loss.detach() / n)` sums into a tensor that is gone as the call returns: nothing but the call's own
arguments refers to it, which reference counts show, held against those of a temporary of our own. An all_gather copies,
so a loss that is made of gathered tensors sends no gradient back through them. That is told where the loss's graph has
saved what was gathered, and the script has not put its own part, which has a gradient, into the list.
"""

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from distlab.tools.check.watch.patches import Function, Patch, before, harmless, in_place_of, put
from distlab.tools.check.watch.recorder import Recorder

MOST_NODES = 2000  # of a graph that are looked at
MOST_LOOKED_AT = 8  # backward passes after such an all_gather
GATHERED = 16  # the newest all_gathers that are remembered

References = tuple[int, int, int]


class LostResults:
    """Watches this process; `install` once."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder, self._telling = recorder, recorder.telling
        self._alone: dict[bool, References] = {}  # by whether the tensor is given by its place
        self._gathered: list[tuple[int, int, list[torch.Tensor]]] = []  # a line, a group, what comes out
        self._looked_at = 0

    def install(self) -> None:
        count = in_place_of(self._count, self._count)  # called as `_read` is
        count(torch.ones(2) / 3)
        count(tensor=torch.ones(2) / 3)
        put(
            Patch(dist, "all_reduce", self._read),
            Patch(dist, "all_gather", before(self._gathers)),
            Patch(dist, "all_gather_into_tensor", before(self._gathers)),
            Patch(torch.autograd, "backward", before(self._backward)),
        )

    def _count(self, function: Function, *args: Any, **named: Any) -> None:  # noqa: ARG002
        self._alone[bool(args)] = references(args, named)

    def _read(self, function: Function, *args: Any, **named: Any) -> Any:
        try:
            alone = references(args, named) == self._alone[bool(args)]
        except Exception:  # it is given no tensor, and torch says so
            alone = False
        if alone:
            self._tell_unread(*args, **named)
        return function(*args, **named)

    @harmless
    def _tell_unread(self, *args: Any, **named: Any) -> None:
        tensor = args[0] if args else named["tensor"]
        waits = not named.get("async_op", args[3] if len(args) > 3 else False)
        # Of memory that NumPy has, and of ones and zeros, which are summed to wait for each other.
        if waits and tensor.untyped_storage().resizable() and not bool(((tensor == 0) | (tensor == 1)).all()):
            group: Any = named.get("group", args[2] if len(args) > 2 else None) or dist.group.WORLD
            number = self.recorder.group_of(group).number
            self._telling.say("unread", "all_reduce", number, self.recorder.places.here(3)[0])

    @harmless
    def _gathers(self, outputs: Any, tensor: torch.Tensor, group: Any = None, *_: Any, **__: Any) -> None:
        if torch.is_grad_enabled() and tensor.grad_fn is not None and tensor.numel() > 1:
            world: Any = dist.group.WORLD
            number = self.recorder.group_of(group or world).number
            place, by_script = self.recorder.places.here(3)
            if by_script and self._looked_at < MOST_LOOKED_AT:
                self._gathered.append((place, number, outputs if isinstance(outputs, list) else [outputs]))
                del self._gathered[:-GATHERED]

    @harmless
    def _backward(self, tensors: Any, *_: Any, **__: Any) -> None:
        gathered, self._gathered = self._gathered, []
        if not gathered:
            return
        self._looked_at += 1
        saved = list(saved_tensors([tensors] if isinstance(tensors, torch.Tensor) else tensors))
        for place, group, outputs in gathered:
            if not any(each.requires_grad for each in outputs) and any(holds(each, outputs) for each in saved):
                self._telling.say("cut", "all_gather", group, place)


def references(args: tuple[Any, ...], named: dict[str, Any]) -> References:
    """How many refer to the tensor that a call is given, to what it is in C++, and to its memory."""
    tensor = args[0] if args else named["tensor"]
    memory = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return sys.getrefcount(tensor), tensor._use_count(), memory


def saved_tensors(roots: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """What the graph of these has saved that has no gradient itself."""
    nodes, seen = [each.grad_fn for each in roots], set[Any]()
    while nodes and len(seen) < MOST_NODES:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        nodes += [following for following, _ in node.next_functions]
        for name in dir(node):
            if name.startswith("_saved_"):
                found = getattr(node, name)
                if isinstance(found, torch.Tensor) and not found.requires_grad:
                    yield found


def holds(saved: torch.Tensor, outputs: list[torch.Tensor]) -> bool:
    """Whether it is one of these, or all of them in a row in memory."""
    if any(saved.data_ptr() == each.data_ptr() for each in outputs):
        return True
    if saved.numel() != sum(each.numel() for each in outputs) or saved.dtype != outputs[0].dtype:
        return False
    if not torch.ops.aten.is_non_overlapping_and_dense(saved):
        return False
    in_a_row = saved.detach().as_strided((saved.numel(),), (1,), saved.storage_offset())
    return torch.equal(in_a_row, torch.cat([each.reshape(-1) for each in outputs]))
