"""Record every collective, send and receive of a process before it is made, from any caller and thread.

PyTorch passes each c10d call through its dispatcher, also from DDP's C++ reducer, fully_shard, DTensor and pipelining.
So our kernel is registered at BackendSelect, which every call reaches just before its device's kernel; it records the
call and passes it on. `python -m benchmarks.beside_torchrun` measures the cost. It uses `redispatch`, which releases
the GIL: calling the device's kernel from Python keeps it, while gloo's thread, which needs the GIL to free tensors that
Python has seen, has a mutex that the kernel waits for. Ends of calls are not reported by gloo's thread either: it would
wait for the GIL too, up to 5 ms per call, and a step of fully_shard on 4 ranks took 1.3 times as long. Ended calls are
found at the next call instead.
"""

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist

from distlab.lab.measure.traffic import DISPATCH_KEY, KEYS_BELOW, OPERATIONS, RESULT, SHAPES, Shape, nbytes_of
from distlab.tools.check.watch.places import Places
from distlab.tools.check.watch.reporter import Reporter, now

# Functional collectives: position of their reduce operation.
FUNCTIONAL = {"all_reduce": 1, "all_reduce_": 1, "reduce_scatter_tensor": 1}
NAMED = ("all_reduce", "broadcast", "reduce")  # calls whose parameter is reported
LEAST_KEPT, MOST_KEPT, MOST_KEPT_BYTES = 2, 16, 1 << 24  # works of ended calls
MOST_OPEN = 64  # calls that are observed: handles without a wait are not kept for ever

Kernel = Callable[..., Any]
Ending: TypeAlias = dist.Work | torch.cuda.Event  # shows when a call has ended


class Group:
    """One process group: its ranks, and the number of collectives that this rank has begun."""

    def __init__(self, number: int, ranks: list[int], group: dist.ProcessGroup) -> None:
        self.number, self.ranks, self.begun = number, ranks, 0
        self._group = weakref.ref(group)

    @property
    def is_on_gloo(self) -> bool:
        """Return whether gloo runs its calls for CPU tensors."""
        group: Any = self._group()
        with suppress(Exception):  # no backend for them
            return bool(group._get_backend(torch.device("cpu")).name() == "gloo")
        return False


class Named(NamedTuple):
    """A parameter or a buffer, and whether a tensor is its gradient."""

    name: str
    number: int  # its id
    gradient: bool = False


class Call(NamedTuple):
    """A recorded call: its number, whether the script itself made it, and its arguments."""

    number: int
    by_script: bool
    op: str
    tensors: tuple[torch.Tensor, ...]
    size: int  # of the group
    place: int
    parameter: Named | None = None  # whose weight or gradient it was given


class Recorder:
    """Records the calls of this process; `install` once, before the script begins."""

    def __init__(self, reporter: Reporter, places: Places) -> None:
        self.reporter, self.places = reporter, places
        self.thread = threading.local()  # .last_call; .reduce, the requested reduce operation
        self.named: Callable[[torch.Tensor], Named | None] = lambda tensor: None  # noqa: ARG005
        self.on_call: list[Callable[[str, tuple[Any, ...], Call, Group], None]] = []  # with the call's arguments
        self.at_end: list[Callable[[], None]] = []  # called when the script has ended well
        self._groups: dict[int, tuple[weakref.ref[dist.ProcessGroup], Group]] = {}
        self._instances: dict[tuple[str, tuple[int, ...]], int] = {}
        self._lock = threading.Lock()
        self._libraries: list[torch.library.Library] = []
        self._open: dict[int, tuple[Ending, int]] = {}  # with their tensors' bytes
        self._kept: deque[tuple[Ending, int]] = deque()
        self._kept_bytes = 0
        self._is_completed: Callable[[dist.Work], bool] = dist.Work.is_completed

    def install(self) -> None:
        """Register before all c10d operations, and before functional ones that wait or that have the reduce
        operation."""
        self._register("c10d", {name: partial(self._recording_kernel, name, shape) for name, shape in SHAPES.items()})
        functional: dict[str, Callable[[Kernel], Kernel]] = {
            name: partial(self._reducing_kernel, position) for name, position in FUNCTIONAL.items()
        }
        self._register("_c10d_functional", functional | {"wait_tensor": self._waiting_kernel})

    def _register(self, namespace: str, makers: dict[str, Callable[[Kernel], Kernel]]) -> None:
        library = torch.library.Library(namespace, "IMPL")
        self._libraries.append(library)
        for name, maker in makers.items():
            pass_on = getattr(getattr(torch.ops, namespace), name).default.redispatch
            library.impl(name, maker(pass_on), DISPATCH_KEY.name, with_keyset=True)

    def _recording_kernel(self, name: str, shape: Shape, pass_on: Kernel) -> Kernel:
        def recorded(keys: Any, *args: Any) -> Any:
            if self.hidden():
                return pass_on(keys & KEYS_BELOW, *args)
            try:
                call = self._begin(name, shape, args)
            except Exception as error:  # a bug of ours must not end the script
                self.reporter.send("unrecorded", name, repr(error))
                return pass_on(keys & KEYS_BELOW, *args)
            result = pass_on(keys & KEYS_BELOW, *args)
            if shape.op in ("send", "recv"):  # only a wait ends them
                return result
            ending = ending_of(name, result)
            if ending is None:
                self.reporter.write(f'["end",{call.number},{now():.6f}]')
            else:
                self._open[call.number] = ending, nbytes_of(call.tensors)
            return result

        return recorded

    def _reducing_kernel(self, position: int, pass_on: Kernel) -> Kernel:
        def reducing(keys: Any, *args: Any) -> Any:
            self.thread.reduce = str(args[position]).lower()
            try:
                return pass_on(keys & KEYS_BELOW, *args)
            finally:
                self.thread.reduce = ""

        return reducing

    def _waiting_kernel(self, pass_on: Kernel) -> Kernel:
        def waiting(keys: Any, *args: Any) -> Any:
            if self.hidden():
                return pass_on(keys & KEYS_BELOW, *args)
            self.sweep()
            thread = threading.get_ident()
            self.reporter.write(f'["wait",-1,{thread},{now():.6f}]')
            try:
                return pass_on(keys & KEYS_BELOW, *args)
            finally:
                self.reporter.write_later(f'["waited",-1,{thread},{now():.6f}]')

        return waiting

    @contextmanager
    def unseen(self) -> Iterator[None]:
        """Hide this thread's calls inside the block, which are the lab's own."""
        self.thread.unseen = getattr(self.thread, "unseen", 0) + 1
        try:
            yield
        finally:
            self.thread.unseen -= 1

    @contextmanager
    def reporting_errors(self, what: str) -> Iterator[None]:
        """Report exceptions instead of raising: our bugs, unknown classes of torch or unreadable tensors."""
        try:
            yield
        except Exception as error:
            self.reporter.send("unrecorded", what, repr(error))

    def hidden(self) -> bool:
        """Return whether this thread is in `unseen`."""
        return bool(getattr(self.thread, "unseen", 0))

    def _begin(self, name: str, shape: Shape, args: tuple[Any, ...]) -> Call:
        self.sweep()
        while len(self._open) > MOST_OPEN:
            self.record_end(next(iter(self._open)))
        group = self.group_of(dist.ProcessGroup.unbox(args[shape.group]))
        place, by_script = self.places.here(3)
        tensors = flat(args[shape.compared]) if shape.compared >= 0 else ()
        by_hand = by_script and shape.op in NAMED and len(tensors) == 1 and len(group.ranks) > 1
        parameter = self.named(tensors[0]) if by_hand else None
        kind = self._kind(name, shape, args, tensors, group, parameter.name if parameter else "")
        number = next(self.reporter.calls)
        if shape.op in ("send", "recv"):
            turn = -1
        else:
            with self._lock:
                turn, group.begun = group.begun, group.begun + 1
        self.reporter.write(
            f'["call",{number},{place},{group.number},{kind},{turn},{threading.get_ident()},{now():.6f}]'
        )
        call = self.thread.last_call = Call(number, by_script, shape.op, tensors, len(group.ranks), place, parameter)
        for observe in self.on_call:
            observe(name, args, call, group)
        return call

    def _kind(
        self, name: str, shape: Shape, args: tuple[Any, ...], tensors: tuple[Any, ...], group: Group, parameter: str
    ) -> int:  # fmt: skip
        """Return the number of this kind of call; the first time it is reported in full."""
        # Ranks may have parts of different sizes (over plain TCP, and NCCL): a reduce_scatter's whole is equal.
        sized = flat(args[shape.whole]) if shape.reduce and shape.whole else tensors
        dims = tuple(tuple(each.shape) for each in sized)
        dtypes = tuple(dict.fromkeys(str(each.dtype).removeprefix("torch.") for each in tensors))
        reduce = getattr(self.thread, "reduce", "") if shape.reduce else ""
        root = group.ranks[args[shape.root]] if shape.root >= 0 else -1
        peer = group.ranks[args[shape.peer]] if shape.peer >= 0 else -1
        tag = args[-1] if shape.op in ("send", "recv") else 0
        splits = splits_of(name, args, len(group.ranks)) if shape.op == "all_to_all" else ()
        matched = dims, dtypes, reduce, root, peer, tag
        rest = splits, parameter
        values = lambda: (shape.op, *matched, whole_bytes(name, args), *rest)  # noqa: E731
        return self.reporter.number("kind", (name, *matched, *rest), values)

    def sweep(self) -> None:
        """Report the calls that have ended since the last check, without waiting."""
        for number, (ending, _) in list(self._open.items()):
            if self._is_completed(ending) if isinstance(ending, dist.Work) else ending.query():
                self.record_end(number)
                self.reporter.write_later(f'["end",{number},{now():.6f}]')

    def forget(self) -> None:
        """Drop all calls at the script's end, so that unreferenced handles are freed."""
        self.sweep()
        self._open.clear()
        self._kept.clear()
        self._kept_bytes = 0
        self.thread.last_call = None

    def reset(self) -> None:
        """Forget all calls and groups, for a new reader."""
        self.forget()
        self._groups.clear()
        self._instances.clear()
        self.reporter.reset()

    def record_end(self, number: int) -> None:
        """Record the end of a call, and keep its work for some more calls.

        If gloo's thread were the last to release it, shortly after the end, it would need the GIL to free a tensor that
        Python has seen, while destroy_process_group waits for that thread with the GIL: 1 of 85 runs next to busy loops
        hung.
        """
        ending = self._open.pop(number, None)
        if ending is not None:
            self._kept.append(ending)
            self._kept_bytes += ending[1]
            while len(self._kept) > LEAST_KEPT and (len(self._kept) > MOST_KEPT or self._kept_bytes > MOST_KEPT_BYTES):
                self._kept_bytes -= self._kept.popleft()[1]

    def group_of(self, group: dist.ProcessGroup) -> Group:
        """Return the record of a process group; reported the first time, with its ranks, torch's name, equal on all
        ranks, and its number among groups of that name, which scripts may create again."""
        entry = self._groups.get(id(group))
        if entry is not None and entry[0]() is group:
            return entry[1]
        try:
            ranks = list(dist.get_process_group_ranks(group))
        except Exception:  # torch has not registered it yet
            ranks = list(range(group.size()))
        name = "" if group.group_desc == "default_pg" else group.group_name
        with self._lock:
            instance = self._instances.get((name, tuple(ranks)), 0)
            self._instances[name, tuple(ranks)] = instance + 1
        key = name, tuple(ranks), instance
        found = Group(self.reporter.number("group", key, lambda: (ranks, name, instance)), ranks, group)
        self._groups[id(group)] = weakref.ref(group), found
        return found


def ending_of(name: str, result: Any) -> Ending | None:
    """Return what shows the end of a call with this result; None if it has ended, or nothing shows it.

    NCCL makes a handle only on request: otherwise the call is over when the GPU's stream reaches its end.
    """
    if name == "monitored_barrier_":
        return None
    work: dist.Work | None = dist.Work.unbox(result[-1] if isinstance(result, tuple) else result)
    if work is not None or not torch.cuda.is_initialized() or torch.cuda.is_current_stream_capturing():
        return work
    event = torch.cuda.Event()
    event.record()
    return event


def flat(tensors: Any) -> tuple[torch.Tensor, ...]:
    """Return all tensors in nested lists."""
    if isinstance(tensors, torch.Tensor):
        return (tensors,)
    return tuple(tensor for each in tensors for tensor in flat(each))


def whole_bytes(name: str, args: tuple[Any, ...]) -> int:
    """Return the full tensor's bytes, as distlab/lab/measure/traffic.py counts them; for a gather this rank's part."""
    _, position = OPERATIONS.get(f"c10d::{name}", ("", RESULT))
    return nbytes_of(args[position]) if position != RESULT else 0


def splits_of(name: str, args: tuple[Any, ...], size: int) -> tuple[Any, ...]:
    """Return the numbers of elements sent to each rank of the group, and received from each."""
    if name == "alltoall_":
        return tuple(each.numel() for each in args[1]), tuple(each.numel() for each in args[0])

    def rows(tensor: torch.Tensor, counts: list[int]) -> tuple[int, ...]:
        row = tensor.numel() // tensor.shape[0] if tensor.dim() and tensor.shape[0] else 0
        return tuple(count * row for count in counts) if counts else (tensor.numel() // size,) * size

    return rows(args[1], args[4]), rows(args[0], args[3])
