"""What a collective gives and nobody can use: the result in a temporary.

`dist.all_reduce(loss.detach() / n)` sums into a tensor that is gone as the call returns: nothing but the call's own
arguments refers to it, which reference counts show, held against those of a temporary of our own.
"""

import sys
from typing import Any

import torch
import torch.distributed as dist

from distlab.tools.check.watch.patches import Function, Patch, harmless, in_place_of, put
from distlab.tools.check.watch.recorder import Recorder

References = tuple[int, int, int]


class LostResults:
    """Watches this process; `install` once."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder, self._telling = recorder, recorder.telling
        self._alone: dict[bool, References] = {}  # by whether the tensor is given by its place

    def install(self) -> None:
        count = in_place_of(self._count, self._count)  # called as `_read` is
        count(torch.ones(2) / 3)
        count(tensor=torch.ones(2) / 3)
        put(
            Patch(dist, "all_reduce", self._read),
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


def references(args: tuple[Any, ...], named: dict[str, Any]) -> References:
    """How many refer to the tensor that a call is given, to what it is in C++, and to its memory."""
    tensor = args[0] if args else named["tensor"]
    memory = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return sys.getrefcount(tensor), tensor._use_count(), memory
