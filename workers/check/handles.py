"""The handles of calls: which one a thread waits for, which is never waited for, and whether its tensor was written
meanwhile.

A handle that the script got (`async_op=True`, isend, irecv) has to be waited for before its tensor is used: one that
goes without that is told with the line of its call. Between call and wait nobody may write into the tensor, which its
version counter shows; a tensor that shares its storage with others is left out, as one counter is all of theirs.
`Work.wait` and the methods of ProcessGroup are replaced by ones that tell, which is why C++ that waits is not seen
here: then a rank stands in a library's frame with a call that has not ended (casebook.py).
"""

import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from workers.check.recording import Call, Recorder
from workers.check.telling import now

CALLS = (
    "allreduce", "allreduce_coalesced", "broadcast", "reduce", "allgather", "_allgather_base", "allgather_coalesced",
    "allgather_into_tensor_coalesced", "all_gather_single", "reduce_scatter", "_reduce_scatter_base",
    "reduce_scatter_single", "reduce_scatter_tensor_coalesced", "scatter", "gather", "alltoall", "alltoall_base",
    "all_to_all_single", "barrier", "send", "recv", "recv_anysource",
)  # fmt: skip
LOOKS = ("is_completed", "is_success", "synchronize", "get_future", "result", "exception")  # as good as a wait
IN_PLACE = ("all_reduce", "broadcast", "reduce", "send", "recv")  # whose result gloo does not copy in, which counts


class Handle:
    """What is known of one handle that the script may hold."""

    def __init__(self, call: Call, place: int) -> None:
        self.call, self.place, self.waited = call.number, place, False
        # Of several tensors gloo copies its result into each, which counts as a write.
        watched = call.tensors if call.op in IN_PLACE and len(call.tensors) == 1 else ()
        self._tensors = [(weakref.ref(tensor), tensor._version) for tensor in watched if alone(tensor)]

    def written(self) -> bool:
        """Whether a tensor was written since the call was made."""
        return any((tensor := ref()) is not None and tensor._version != version for ref, version in self._tensors)


class Handles:
    """Watches the handles of this process; `install` once."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder, self._telling = recorder, recorder.telling
        self._of: dict[int, Handle] = {}  # by id of the Work object, which takes its entry with it

    def install(self) -> None:
        """Replace what Python calls."""
        group: Any = dist.ProcessGroup
        for name in CALLS:
            if hasattr(group, name):
                setattr(group, name, self._made(getattr(group, name)))
        work: Any = dist.Work
        work.wait = self._wait(work.wait)
        for name in LOOKS:
            setattr(work, name, self._look(getattr(work, name)))

    def _made(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def made(group: dist.ProcessGroup, *args: Any, **named: Any) -> Any:
            thread = self._recorder.thread
            thread.made, thread.reduce = None, reduce_of(args, named)
            try:
                work = method(group, *args, **named)
            finally:
                thread.reduce = ""
            call: Call | None = thread.made
            thread.made = None
            if work is not None and call is not None:
                handle = Handle(call, self._recorder.places.here(2)[0])
                self._of[id(work)] = handle
                weakref.finalize(work, self._gone, id(work), handle, call.by_script)
            return work

        return made

    def _wait(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def wait(work: dist.Work, *args: Any, **named: Any) -> Any:
            handle = self._of.get(id(work))
            if handle is None:
                return method(work, *args, **named)
            thread = threading.get_ident()
            if not handle.waited and handle.written():
                self._telling.say("written", handle.call, self._recorder.places.here(2)[0])
            handle.waited = True
            self._telling.write(f'["wait",{handle.call},{thread},{now():.6f}]')
            try:
                return method(work, *args, **named)
            finally:
                self._recorder.ended(handle.call)
                self._telling.write_later(f'["waited",{handle.call},{thread},{now():.6f}]')

        return wait

    def _look(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def look(work: dist.Work, *args: Any) -> Any:
            handle = self._of.get(id(work))
            if handle is not None:
                handle.waited = True
            return method(work, *args)

        return look

    def _gone(self, key: int, handle: Handle, by_script: bool) -> None:
        if self._of.get(key) is handle:
            del self._of[key]
        if by_script and not handle.waited:
            self._telling.say("unwaited", handle.call)


def alone(tensor: torch.Tensor) -> bool:
    """Whether nothing else lies in the tensor's storage, so that its version counter is its own."""
    if tensor.is_inference() or tensor.is_sparse:
        return False
    return tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()


def reduce_of(args: tuple[Any, ...], named: dict[str, Any]) -> str:
    """The reduce operation among the arguments of a method of ProcessGroup; empty where there is none."""
    for value in (*args, *named.values()):
        found = getattr(value, "reduceOp", value)
        if isinstance(found, dist.ReduceOp):
            found = found.op  # type: ignore[attr-defined]
        if isinstance(found, dist.ReduceOp.RedOpType):
            return str(found.name).lower()
    return ""
