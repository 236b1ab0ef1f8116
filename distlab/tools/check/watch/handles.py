"""Record the handles of calls: waits, handles that are never waited for, and tensors that were written in flight.

The script must wait for a handle (`async_op=True`, isend, irecv) before it uses the tensor: a handle freed without a
wait is reported with the line of its call. Between call and wait nobody may write to the tensor; its version counter
shows it, if it alone uses its storage. `Work.wait` and the methods of ProcessGroup are wrapped, so waits inside C++ are
not seen here: then a rank is in a library's frame with an open call (rank_state.py).
"""

import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import CodeType
from typing import Any

import torch
import torch.distributed as dist

from distlab.lab.measure import traffic
from distlab.lab.measure.traffic import Endpoint, NoDiagnostics
from distlab.tools.check.watch.patches import Function, Patch, before, put
from distlab.tools.check.watch.places import PASSED_ON
from distlab.tools.check.watch.recorder import Call, Recorder
from distlab.tools.check.watch.reporter import now

CALLS = (
    "allreduce", "allreduce_coalesced", "broadcast", "reduce", "allgather", "_allgather_base", "allgather_coalesced",
    "allgather_into_tensor_coalesced", "all_gather_single", "reduce_scatter", "_reduce_scatter_base",
    "reduce_scatter_single", "reduce_scatter_tensor_coalesced", "scatter", "gather", "alltoall", "alltoall_base",
    "all_to_all_single", "barrier", "send", "recv", "recv_anysource",
)  # fmt: skip
INSPECTIONS = ("is_completed", "is_success", "synchronize", "get_future", "result", "exception")  # as good as a wait
IN_PLACE = ("all_reduce", "broadcast", "reduce", "send", "recv")  # whose result gloo does not copy in, which counts


class Handle:
    """The state of a handle that the script may have."""

    def __init__(self, call: Call, watched: bool) -> None:
        self.call, self.waited = call.number, False
        # For several tensors gloo copies its result into each, which counts as a write.
        tensors = call.tensors if watched and call.op in IN_PLACE and len(call.tensors) == 1 else ()
        self._tensors = [(weakref.ref(tensor), tensor._version) for tensor in tensors if owns_storage(tensor)]

    def written(self) -> bool:
        return any((tensor := ref()) is not None and tensor._version != version for ref, version in self._tensors)


class Handles:
    """Observes the handles of this process; `install` once."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder, self._reporter = recorder, recorder.reporter
        self._handles: dict[int, Handle] = {}  # by id of the Work object, whose end removes the entry

    def install(self) -> None:
        calls = [Patch(dist.ProcessGroup, name, self._record) for name in CALLS if hasattr(dist.ProcessGroup, name)]
        inspections = [Patch(dist.Work, name, before(self._note_inspected)) for name in INSPECTIONS]
        put(*calls, *inspections, Patch(dist.Work, "wait", self._wait))

    def _record(self, method: Function, group: dist.ProcessGroup, *args: Any, **named: Any) -> Any:
        thread = self._recorder.thread
        thread.last_call, thread.reduce = None, reduce_of(args, named)
        # For an average gloo divides in its own thread, which counts as a write.
        watched = is_asynchronous(args, sys._getframe(2).f_code) and thread.reduce != "avg"
        try:
            work = method(group, *args, **named)
        finally:
            thread.reduce = ""
        call: Call | None = thread.last_call
        thread.last_call = None
        if work is not None and call is not None:
            handle = Handle(call, watched)
            self._handles[id(work)] = handle
            weakref.finalize(work, self._on_freed, id(work), handle, call.by_script)
        return work

    def _wait(self, method: Function, work: dist.Work, *args: Any, **named: Any) -> Any:
        handle = self._handles.get(id(work))
        if handle is None:
            return method(work, *args, **named)
        thread = threading.get_ident()
        if not handle.waited and handle.written():
            self._reporter.send("written", handle.call, self._recorder.places.here(2)[0])
        handle.waited = True
        self._reporter.write(f'["wait",{handle.call},{thread},{now():.6f}]')
        try:
            return method(work, *args, **named)
        finally:
            self._recorder.record_end(handle.call)
            self._reporter.write_later(f'["waited",{handle.call},{thread},{now():.6f}]')

    def _note_inspected(self, work: dist.Work, *_: Any) -> None:
        handle = self._handles.get(id(work))
        if handle is not None:
            handle.waited = True

    def _on_freed(self, key: int, handle: Handle, by_script: bool) -> None:
        if self._handles.get(key) is handle:
            del self._handles[key]
        if by_script and not handle.waited:
            self._reporter.send("unwaited", handle.call)


def owns_storage(tensor: torch.Tensor) -> bool:
    """Return whether the tensor is alone in its storage, so that its version counter is its own."""
    if tensor.is_inference() or tensor.is_sparse:
        return False
    return tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()


def is_asynchronous(args: tuple[Any, ...], caller: CodeType) -> bool:
    """Return whether a handle was requested from a ProcessGroup method; otherwise torch.distributed waits at once."""
    by_function = caller.co_filename.endswith(PASSED_ON) and caller.co_name not in ("isend", "irecv")
    return not by_function or any(getattr(each, "asyncOp", False) for each in args)


def reduce_of(args: tuple[Any, ...], named: dict[str, Any]) -> str:
    """Return the reduce operation in the arguments of a ProcessGroup method; empty without one."""
    for value in (*args, *named.values()):
        found = getattr(value, "reduceOp", value)
        if isinstance(found, dist.ReduceOp):
            found = found.op  # type: ignore[attr-defined]
        if isinstance(found, dist.ReduceOp.RedOpType):
            return str(found.name).lower()
    return ""


# Other waits of a rank: for a key of a store, or for a group that is being created.
#
# Each is a torch function called from Python, and is recorded when entered and left, with what it waits for. Creating a
# group needs all ranks of the world, unless only its members synchronise.

STORE = ("wait", "get", "multi_get")


class Waits:
    """Observes these functions; `install` once. `notify` is called with notices about changed calls."""

    def __init__(self, recorder: Recorder, notify: Callable[[str], None], store_port: int) -> None:
        self._store_port = store_port  # its connections are not the training's traffic
        self._recorder, self._reporter, self._notify = recorder, recorder.reporter, notify
        self._inside = threading.local()  # .depth: torch's own waits inside one are part of it

    def install(self) -> None:
        c10d = dist.distributed_c10d
        stores = dict.fromkeys([dist.Store, dist.TCPStore, dist.FileStore, dist.HashStore, dist.PrefixStore])
        keys = [(store, name) for store in stores for name in STORE if name in vars(store)]
        put(*(Patch(store, name, partial(self._record_wait, f"store.{name}")) for store, name in keys))
        for place in (c10d, dist):
            put(*(Patch(place, name, partial(self._record_wait, name)) for name in ("init_process_group", "new_group")))
            # Sockets' counters vanish with them.
            put(Patch(place, "destroy_process_group", before(self.report_sockets)))

    def _record_wait(self, name: str, function: Function, *args: Any, **named: Any) -> Any:
        if getattr(self._inside, "depth", 0):
            return function(*args, **named)
        if name in ("init_process_group", "new_group"):
            args, named = self._on_gloo(args, named, 0 if name == "init_process_group" else 2)
        self._inside.depth = 1
        place, by_script = self._recorder.places.here(2)
        thread = threading.get_ident()
        reported = (by_script or not name.startswith("store")) and not self._recorder.hidden()
        if reported:
            self._reporter.send("enter", name, self._awaited(name, args, named), place, thread, now())
        try:
            return function(*args, **named)
        finally:
            self._inside.depth = 0
            if reported:
                self._reporter.send("leave", thread, now())

    def report_sockets(self, *_: Any, **__: Any) -> None:
        """Report the bytes that each connection of this process has sent so far."""
        self._reporter.send("sockets", [(*ends, nbytes) for ends, nbytes in self.sent_bytes().items()])

    def sent_bytes(self) -> dict[tuple[Endpoint, Endpoint], int]:
        """Return the bytes that each connection has sent, by its two ends; none if the system has no counters."""
        with suppress(NoDiagnostics):
            found = traffic.connections(self._store_port).values()
            return {(each.local, each.remote): each.sent_bytes for each in found}
        return {}

    def _on_gloo(self, args: tuple[Any, ...], named: dict[str, Any], position: int) -> tuple[tuple[Any, ...], Any]:
        """Return the same call with gloo if NCCL is requested and there is no GPU."""
        if torch.cuda.is_available():
            return args, named
        backend = named.get("backend", args[position] if len(args) > position else None)
        if not isinstance(backend, str) or "nccl" not in backend.lower():
            return args, named
        self._notify(f"the script requests backend {backend!r}: this machine has no GPU, so check uses gloo")
        named = {name: value for name, value in named.items() if name not in ("device_id", "pg_options")}
        if "backend" in named or len(args) <= position:
            return args, named | {"backend": "gloo"}
        return (*args[:position], "gloo", *args[position + 1 :]), named

    def _awaited(self, name: str, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Return what is waited for: keys of a store, a new group's ranks and whether only its members create it, or
        the world's size and this rank, if the script gives them."""
        if name.startswith("store"):
            keys = args[1] if len(args) > 1 else named.get("keys", named.get("key", ""))
            return [str(each) for each in keys] if isinstance(keys, (list, tuple)) else [str(keys)]
        if name == "new_group":
            ranks = args[0] if args else named.get("ranks")
            return [None if ranks is None else sorted(ranks), bool(named.get("use_local_synchronization", False))]
        first = [named.get(each, args[at] if len(args) > at else -1) for at, each in ((3, "world_size"), (4, "rank"))]
        return first if all(isinstance(each, int) for each in first) else []
