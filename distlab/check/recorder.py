"""Every collective, send and receive of a process, told before it is made: whoever makes it, on whatever thread.

PyTorch hands each c10d call through its dispatcher, DDP's reducer in C++, fully_shard, DTensor and pipelining too. So a
kernel of ours stands at BackendSelect, which every call passes just before its device's own kernel, tells, and passes
it on. What that costs a step is measured by `python -m benchmarks.recording`. It is passed on by
`redispatch`, which lets go of the interpreter's lock: to call the device's kernel as one of Python's keeps it, and
gloo's thread, which needs it to free what Python has seen, holds a mutex that the kernel waits for. Nor is gloo's
thread asked to tell when a call has ended: it would wait for that lock too, up to 5 ms a call, and a step of
fully_shard on 4 ranks took 1.3 times as long. Calls that have ended are looked for with the next one instead.
"""

import functools
import itertools
import json
import os
import sys
import sysconfig
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from distlab.measure.traffic import BELOW, HERE, OPERATIONS, RESULT, SHAPES, Shape, nbytes_of

# What the script's process tells its doctor: one JSON list a line, in a pipe, before the call that it tells of.
#
# What stands in a pipe is read even if the writer has died meanwhile: gloo aborts a process whose tensors do not fit,
# and os._exit asks nobody. A line is 40 to 100 bytes: what comes again and again (a place in the source, a group, a
# kind of call) is told once and has a number from then on. A process that the script forks has the pipe too and says
# nothing.


class Telling:
    """The writing end; safe to use from every thread of the script."""

    def __init__(self, pipe: int) -> None:
        self._pipe = pipe
        self._lock = threading.RLock()
        self._numbers: dict[tuple[str, Hashable], int] = {}
        self.calls = itertools.count(1)  # numbers for calls
        self._later: list[str] = []
        os.register_at_fork(after_in_child=self._fall_silent)

    def _fall_silent(self) -> None:
        self._pipe, self._lock = -1, threading.RLock()

    def say(self, kind: str, *values: Any) -> None:
        self.write(json.dumps([kind, *values], default=repr))

    def write(self, line: str) -> None:
        """Tell what is JSON already."""
        if self._pipe < 0:
            return
        with self._lock, suppress(OSError):  # nobody listens any more: the script goes on
            data = f"{''.join(self._later)}{line}\n".encode()
            self._later.clear()
            while data:
                data = data[os.write(self._pipe, data) :]

    def write_later(self, line: str) -> None:
        """The same with the next thing that is told: of what is over, nobody waits for the news."""
        if self._pipe >= 0:
            with self._lock:
                self._later.append(f"{line}\n")

    def number(self, kind: str, key: Hashable, values: Callable[[], Sequence[Any]]) -> int:
        """The number of what is called `key` among its kind; the `values` of a new one are told, before any thread has
        the number."""
        found = self._numbers.get((kind, key))
        if found is None:
            with self._lock:
                found = self._numbers.get((kind, key), len(self._numbers))
                self.say(kind, found, *values())
                self._numbers[kind, key] = found
        return found

    def anew(self) -> None:
        """Number all things from the beginning, for who has heard nothing yet."""
        with self._lock:
            self._numbers.clear()
            self._later.clear()
            self.calls = itertools.count(1)


def now() -> float:
    """The clock of all that is told: one for all processes of a machine."""
    return time.monotonic()


# Where in the source a call is made: the script's own line, and below it the hook or the library that made it.
#
# A frame belongs to the user unless its file is Python's, a package's or the lab's. Below the user's line stands the
# innermost frame of a library that says more than torch.distributed's own functions do: `loss.backward()` made the
# call, and autograd's engine in it, or fully_shard's all_gather.

LAB = str(Path(__file__).parents[1]) + "/"
PACKAGES = ("site-packages/", "dist-packages/")
PASSED_ON = ("torch/distributed/distributed_c10d.py", "torch/distributed/c10d_logger.py", "torch/_ops.py")


class Places:
    """Of one process; `folder` is the script's."""

    def __init__(self, telling: Telling, folder: Path) -> None:
        self._telling, self._folder = telling, folder
        paths = sysconfig.get_paths()
        self._libraries = tuple({f"{Path(paths[name])}/" for name in ("stdlib", "platstdlib", "purelib", "platlib")})
        self._kinds: dict[str, str] = {}

    def here(self, depth: int = 1) -> tuple[int, bool]:
        """The number of the place that the caller's `depth`-th frame stands in, and whether the script itself called:
        no library but torch.distributed's own functions lies between."""
        frame: FrameType | None = sys._getframe(depth)
        below: tuple[CodeType, int] | None = None
        while frame is not None:
            kind = self.kind(frame.f_code.co_filename)
            if kind == "user":
                break
            if kind == "library" and below is None:
                below = frame.f_code, frame.f_lineno
            frame = frame.f_back
        user = (frame.f_code, frame.f_lineno) if frame is not None else None
        file = user[0].co_filename if user else ""
        told = self._telling.number("place", (user, below), lambda: (self._shown(user), self._shown(below), file))
        return told, below is None

    def line_of(self, depth: int = 1) -> str:
        """The script's own line below the caller's `depth`-th frame, in words."""
        frame: FrameType | None = sys._getframe(depth)
        while frame is not None and self.kind(frame.f_code.co_filename) != "user":
            frame = frame.f_back
        return self._shown((frame.f_code, frame.f_lineno) if frame is not None else None)

    def kind(self, file: str) -> str:
        """Whose file it is: "user", "library", or "passed on" by those whose frames say nothing."""
        found = self._kinds.get(file)
        if found is None:
            if file.startswith(LAB) or file.endswith(PASSED_ON):
                found = "passed on"
            elif file.startswith(("<", *self._libraries)) or any(each in file for each in PACKAGES):
                found = "library"
            else:
                found = "user"
            self._kinds[file] = found
        return found

    def _shown(self, at: tuple[CodeType, int] | None) -> str:
        if at is None:
            return ""
        path, line = Path(at[0].co_filename), at[1]
        if path.is_relative_to(self._folder):
            return f"{path.relative_to(self._folder)}:{line}"
        for each in PACKAGES:
            if each in str(path):
                return f"{str(path).rpartition(each)[2]}:{line} ({at[0].co_name})"
        return f"{path.name}:{line} ({at[0].co_name})" if str(path).startswith(self._libraries) else f"{path}:{line}"


# Functional collectives: where their reduce operation stands.
FUNCTIONAL = {"all_reduce": 1, "all_reduce_": 1, "reduce_scatter_tensor": 1}
NAMED = ("all_reduce", "broadcast", "reduce")  # of which the parameter is told that was given
LEAST_HELD, MOST_HELD, MOST_HELD_BYTES = 2, 16, 1 << 24  # works of calls that are over
MOST_OPEN = 64  # calls that are looked after: what nobody waits for is not kept for ever

Kernel = Callable[..., Any]


class Group:
    """One process group: its ranks, and how many of its collectives this rank has begun."""

    def __init__(self, number: int, ranks: list[int]) -> None:
        self.number, self.ranks, self.begun = number, ranks, 0


class Named(NamedTuple):
    """A parameter or a buffer, and whether a tensor is its gradient."""

    name: str
    number: int  # its id
    gradient: bool = False


class Call(NamedTuple):
    """A call that was made: its number, whether the script itself made it, and what it was given."""

    number: int
    by_script: bool
    op: str
    tensors: tuple[torch.Tensor, ...]
    size: int  # of the group
    place: int
    parameter: Named | None = None  # of which it was given the weight or the gradient


class Recorder:
    """Tells the calls of this process; `install` once, before the script begins."""

    def __init__(self, telling: Telling, places: Places) -> None:
        self.telling, self.places = telling, places
        self.thread = threading.local()  # .made, the last call; .reduce, what torch.distributed was asked to reduce by
        self.on_reduce: Callable[[Call, Group], None] = lambda call, group: None  # noqa: ARG005
        self.on_broadcast: Callable[[Call, Group], None] = lambda call, group: None  # noqa: ARG005
        self.named: Callable[[torch.Tensor], Named | None] = lambda tensor: None  # noqa: ARG005
        self.on_call: list[Callable[[str, tuple[Any, ...], Call, Group], None]] = []  # with the call's arguments
        self.at_end: list[Callable[[], None]] = []  # what is called when the script has ended well
        self._groups: dict[int, tuple[weakref.ref[dist.ProcessGroup], Group]] = {}
        self._instances: dict[tuple[str, tuple[int, ...]], int] = {}
        self._lock = threading.Lock()
        self._libraries: list[torch.library.Library] = []
        self._open: dict[int, tuple[dist.Work, int]] = {}  # with the bytes of their tensors
        self._held: deque[tuple[dist.Work, int]] = deque(maxlen=MOST_HELD)
        self._is_completed: Callable[[dist.Work], bool] = dist.Work.is_completed

    def install(self) -> None:
        """Stand before all c10d operations, and before the functional ones that wait or that know by what they
        reduce."""
        self._stand("c10d", {name: partial(self._recorded, name, shape) for name, shape in SHAPES.items()})
        functional: dict[str, Callable[[Kernel], Kernel]] = {
            name: partial(self._reducing, position) for name, position in FUNCTIONAL.items()
        }
        self._stand("_c10d_functional", functional | {"wait_tensor": self._waiting})

    def _stand(self, namespace: str, makers: dict[str, Callable[[Kernel], Kernel]]) -> None:
        library = torch.library.Library(namespace, "IMPL")
        self._libraries.append(library)
        for name, maker in makers.items():
            pass_on = getattr(getattr(torch.ops, namespace), name).default.redispatch
            library.impl(name, maker(pass_on), HERE.name, with_keyset=True)

    def _recorded(self, name: str, shape: Shape, pass_on: Kernel) -> Kernel:
        def recorded(keys: Any, *args: Any) -> Any:
            if self.hidden():
                return pass_on(keys & BELOW, *args)
            try:
                call = self._begin(name, shape, args)
            except Exception as error:  # a defect of ours may not end the script
                self.telling.say("unrecorded", name, repr(error))
                return pass_on(keys & BELOW, *args)
            result = pass_on(keys & BELOW, *args)
            if name == "monitored_barrier_":
                self.telling.write(f'["end",{call.number},{now():.6f}]')
            elif shape.op not in ("send", "recv"):  # which end with their wait alone
                work = dist.Work.unbox(result[-1] if isinstance(result, tuple) else result)
                self._open[call.number] = work, nbytes_of(call.tensors)
            return result

        return recorded

    def _reducing(self, position: int, pass_on: Kernel) -> Kernel:
        def reducing(keys: Any, *args: Any) -> Any:
            self.thread.reduce = str(args[position]).lower()
            try:
                return pass_on(keys & BELOW, *args)
            finally:
                self.thread.reduce = ""

        return reducing

    def _waiting(self, pass_on: Kernel) -> Kernel:
        def waiting(keys: Any, *args: Any) -> Any:
            if self.hidden():
                return pass_on(keys & BELOW, *args)
            self.sweep()
            thread = threading.get_ident()
            self.telling.write(f'["wait",-1,{thread},{now():.6f}]')
            try:
                return pass_on(keys & BELOW, *args)
            finally:
                self.telling.write_later(f'["waited",-1,{thread},{now():.6f}]')

        return waiting

    @contextmanager
    def unseen(self) -> Iterator[None]:
        """What this thread calls meanwhile is the lab's own, and not told."""
        self.thread.unseen = getattr(self.thread, "unseen", 0) + 1
        try:
            yield
        finally:
            self.thread.unseen -= 1

    def hidden(self) -> bool:
        """Whether this thread is in `unseen`."""
        return bool(getattr(self.thread, "unseen", 0))

    def _begin(self, name: str, shape: Shape, args: tuple[Any, ...]) -> Call:
        self.sweep()
        while len(self._open) > MOST_OPEN:
            self.ended(next(iter(self._open)))
        group = self.group_of(dist.ProcessGroup.unbox(args[shape.group]))
        place, by_script = self.places.here(3)
        tensors = flat(args[shape.compared]) if shape.compared >= 0 else ()
        by_hand = by_script and shape.op in NAMED and len(tensors) == 1 and len(group.ranks) > 1
        parameter = self.named(tensors[0]) if by_hand else None
        kind = self._kind(name, shape, args, tensors, group, parameter.name if parameter else "")
        number = next(self.telling.calls)
        if shape.op in ("send", "recv"):
            turn = -1
        else:
            with self._lock:
                turn, group.begun = group.begun, group.begun + 1
        self.telling.write(
            f'["call",{number},{place},{group.number},{kind},{turn},{threading.get_ident()},{now():.6f}]'
        )
        call = self.thread.made = Call(number, by_script, shape.op, tensors, len(group.ranks), place, parameter)
        for look in self.on_call:
            look(name, args, call, group)
        if shape.reduce:
            self.on_reduce(call, group)
        elif shape.root >= 0:
            self.on_broadcast(call, group)
        return call

    def _kind(
        self, name: str, shape: Shape, args: tuple[Any, ...], tensors: tuple[Any, ...], group: Group, parameter: str
    ) -> int:  # fmt: skip
        """The number of calls like this one; told in full the first time."""
        # Ranks may take parts of other sizes (over plain TCP, and NCCL): of a reduce_scatter the whole is alike.
        given = flat(args[shape.whole]) if shape.reduce and shape.whole else tensors
        dims = tuple(tuple(each.shape) for each in given)
        dtypes = tuple(dict.fromkeys(str(each.dtype).removeprefix("torch.") for each in tensors))
        reduce = getattr(self.thread, "reduce", "") if shape.reduce else ""
        root = group.ranks[args[shape.root]] if shape.root >= 0 else -1
        peer = group.ranks[args[shape.peer]] if shape.peer >= 0 else -1
        tag = args[-1] if shape.op in ("send", "recv") else 0
        splits = splits_of(name, args, len(group.ranks)) if shape.op == "all_to_all" else ()
        alike = dims, dtypes, reduce, root, peer, tag
        rest = splits, parameter
        told = self.telling.number
        return told("kind", (name, *alike, *rest), lambda: (shape.op, *alike, whole_bytes(name, args), *rest))

    def sweep(self) -> None:
        """Tell which calls have ended since the last look; without waiting."""
        for number, (work, _) in list(self._open.items()):
            if self._is_completed(work):
                self.ended(number)
                self.telling.write_later(f'["end",{number},{now():.6f}]')

    def forget(self) -> None:
        """Let go of all calls, at the script's end: a handle that nobody else has is gone then."""
        self.sweep()
        self._open.clear()
        self._held.clear()
        self.thread.made = None

    def anew(self) -> None:
        """Forget all calls and groups: what comes is told to somebody else."""
        self.forget()
        self._groups.clear()
        self._instances.clear()
        self.telling.anew()

    def ended(self, number: int) -> None:
        """A call is over. Its work is held on to for some calls more.

        Were gloo's thread the last to let go of it, which it does a moment after the end, it would need the
        interpreter's lock to free a tensor that Python has seen, and destroy_process_group waits for that thread with
        the lock held: 1 of 85 runs beside busy loops hung so.
        """
        over = self._open.pop(number, None)
        if over is not None:
            self._held.append(over)
            while len(self._held) > LEAST_HELD and sum(nbytes for _, nbytes in self._held) > MOST_HELD_BYTES:
                self._held.popleft()

    def group_of(self, group: dist.ProcessGroup) -> Group:
        """What is known of a process group; told the first time, by its ranks and torch's name for it, which all ranks
        give it alike, and as the how-manieth of these: a name comes again where a script makes its groups anew."""
        entry = self._groups.get(id(group))
        if entry is not None and entry[0]() is group:
            return entry[1]
        try:
            ranks = list(dist.get_process_group_ranks(group))
        except Exception:  # torch has not written it down yet
            ranks = list(range(group.size()))
        name = "" if group.group_desc == "default_pg" else group.group_name
        with self._lock:
            instance = self._instances.get((name, tuple(ranks)), 0)
            self._instances[name, tuple(ranks)] = instance + 1
        key = name, tuple(ranks), instance
        found = Group(self.telling.number("group", key, lambda: (ranks, name, instance)), ranks)
        self._groups[id(group)] = weakref.ref(group), found
        return found


def preceded(function: Callable[..., Any], before: Callable[..., None]) -> Callable[..., Any]:
    """The same function, which first calls `before` with its arguments."""

    @functools.wraps(function)
    def both(*args: Any, **named: Any) -> Any:
        before(*args, **named)
        return function(*args, **named)

    return both


def flat(tensors: Any) -> tuple[torch.Tensor, ...]:
    """All tensors in a list of lists."""
    if isinstance(tensors, torch.Tensor):
        return (tensors,)
    return tuple(tensor for each in tensors for tensor in flat(each))


def whole_bytes(name: str, args: tuple[Any, ...]) -> int:
    """Bytes of the whole tensor, as distlab/measure/traffic.py counts them; of a gather this rank's part."""
    _, position = OPERATIONS.get(f"c10d::{name}", ("", RESULT))
    return nbytes_of(args[position]) if position != RESULT else 0


def splits_of(name: str, args: tuple[Any, ...], size: int) -> tuple[Any, ...]:
    """How many elements go to each rank of the group, and how many come from it."""
    if name == "alltoall_":
        return tuple(each.numel() for each in args[1]), tuple(each.numel() for each in args[0])

    def rows(tensor: torch.Tensor, given: list[int]) -> tuple[int, ...]:
        row = tensor.numel() // tensor.shape[0] if tensor.dim() and tensor.shape[0] else 0
        return tuple(count * row for count in given) if given else (tensor.numel() // size,) * size

    return rows(args[1], args[4]), rows(args[0], args[3])
