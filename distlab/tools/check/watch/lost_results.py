"""Detect collective results that are lost because they are written to a temporary.

`dist.all_reduce(loss.detach() / n)` sums into a tensor that is freed when the call returns: only the call's own
arguments refer to it, as reference counts show when compared with those of a known temporary.
"""

import sys
from typing import Any

import torch
import torch.distributed as dist

from distlab.tools.check.watch.patches import Function, Patch, harmless, in_place_of, put
from distlab.tools.check.watch.recorder import Recorder

References = tuple[int, int, int]


class LostResults:
    """Observes this process; `install` once."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder, self._reporter = recorder, recorder.reporter
        self._of_temporary: dict[bool, References] = {}  # by whether the tensor is passed by position

    def install(self) -> None:
        count = in_place_of(self._count, self._count)  # called as `_all_reduce` is
        count(torch.ones(2) / 3)
        count(tensor=torch.ones(2) / 3)
        put(
            Patch(dist, "all_reduce", self._all_reduce),
        )

    def _count(self, function: Function, *args: Any, **named: Any) -> None:  # noqa: ARG002
        self._of_temporary[bool(args)] = references(args, named)

    def _all_reduce(self, function: Function, *args: Any, **named: Any) -> Any:
        try:
            is_temporary = references(args, named) == self._of_temporary[bool(args)]
        except Exception:  # no tensor is given, and torch reports it
            is_temporary = False
        if is_temporary:
            self._report_unread(*args, **named)
        return function(*args, **named)

    @harmless
    def _report_unread(self, *args: Any, **named: Any) -> None:
        tensor = args[0] if args else named["tensor"]
        waits = not named.get("async_op", args[3] if len(args) > 3 else False)
        # Exclude memory of NumPy, and ones and zeros, which are summed only to synchronise.
        if waits and tensor.untyped_storage().resizable() and not bool(((tensor == 0) | (tensor == 1)).all()):
            group: Any = named.get("group", args[2] if len(args) > 2 else None) or dist.group.WORLD
            number = self.recorder.group_of(group).number
            self._reporter.send("unread", "all_reduce", number, self.recorder.places.here(3)[0])


def references(args: tuple[Any, ...], named: dict[str, Any]) -> References:
    """Return the reference counts of a call's tensor, of its C++ object, and of its memory."""
    tensor = args[0] if args else named["tensor"]
    memory = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return sys.getrefcount(tensor), tensor._use_count(), memory
