"""Rank 0's view of one rank: its open calls, what it waits in, how it ended.

A rank waits if one of its threads has entered a wait and not left it. C++ code that waits reports nothing (DDP's
reducer in the backward pass): then a call is open, the process has no CPU time, and its main thread is in a frame of
torch. A rank in a line of the script itself, asleep or busy, waits for nobody.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar, get_origin, get_type_hints

from distlab.lab.cluster import name_ranks
from distlab.lab.measure.traffic import sent_bytes
from distlab.tools.check.judge.progress import NO_PROGRESS, History, Progress

IDLE_SHARE = 0.05  # of a core, since the last look: below it a rank is idle
LIBRARY_WAITS = ("threading.py", "queue.py", "selectors.py", "concurrent/futures/")  # for another thread of the script
ENGINE = "_engine_run_backward"
IN_A_THREAD = ", in a thread of its own"
OBJECTS = ("_object", "_object_list")
LOADERS = "torch/utils/data/"
MADE, INITIALISED = -1, -2  # instances for non-collectives, reached by all of a group's ranks
MOST_KNOWN_CALLS = 50_000  # calls whose handles may still be used
Value = TypeVar("Value")


class CallPlace(NamedTuple):
    """A line of the script, and the code between it and the call; any part may be empty."""

    line: str = ""
    below: str = ""  # the library's line that made the call, or torch's function for Python objects
    file: str = ""
    typed: str = ""  # the framework's function that the line calls
    called_by: str = ""  # the framework's function that called the line, and where the user called that
    callers: str = ""  # the user's own lines that called it, the nearest first
    in_thread: bool = False  # started by Python
    package: str = ""  # the framework's

    @property
    def named_call(self) -> str:
        """Return the torch.distributed function that the script called by name and that makes calls; or empty."""
        return self.below.removesuffix(IN_A_THREAD) if self.below.startswith("torch.distributed.") else ""

    @property
    def object_call(self) -> str:
        """Return the torch.distributed function for Python objects that the script called; or empty."""
        return self.below if self.below.endswith(OBJECTS) else ""

    @property
    def framework(self) -> str:
        """Return the framework's function that the user called, above the line or in it."""
        return self.called_by.partition(" at ")[0] or self.typed

    def __str__(self) -> str:
        below = "the backward pass" if ENGINE in self.below else self.below
        below = "" if self.object_call else below
        if self.typed:
            below = f"{self.typed} in {below}" if ENGINE in self.below else self.typed
        text = f"{self.line} in {below}" if self.line and below else self.line or below or "?"
        return f"{text}, called by {self.called_by}" if self.called_by else text


class GroupKey(NamedTuple):
    """A process group: its ranks, torch's name for it (none for the default group), and its number among groups of this
    name; negative for non-collectives."""

    ranks: tuple[int, ...]
    name: str = ""
    instance: int = 0

    def __hash__(self) -> int:
        """Hash only some of the ranks: a hash of all took most of the time of a job of 512."""
        return hash((self.ranks[:4], len(self.ranks), self.name, self.instance))


class Kind(NamedTuple):
    """The fields that matched calls must have in common, and the bytes of the full tensor."""

    op: str
    dims: tuple[tuple[int, ...], ...] = ()
    dtypes: tuple[str, ...] = ()
    reduce: str = ""
    root: int = -1
    peer: int = -1
    tag: int = 0
    nbytes: int = 0
    splits: tuple[tuple[int, ...], ...] = ()
    parameter: str = ""  # passed explicitly, as weight or gradient; may differ between ranks


@dataclass(slots=True)
class Call:
    """One call of one rank; `seq` counts in its group, or among messages of the same ends; negative if unknown."""

    rank: int
    place: CallPlace
    group: GroupKey
    kind: Kind
    seq: int
    thread: int
    began_s: float
    ended_s: float | None = None
    reached: Progress = NO_PROGRESS  # before it


class Frame(NamedTuple):
    """A line of a Python stack."""

    file: str
    line: int
    function: str


class Wait(NamedTuple):
    """What a thread waits in: a call, or another function in its own words."""

    call: Call | None
    what: str
    place: CallPlace
    since_s: float


class Raised(NamedTuple):
    """The exception that ended a script."""

    kind: str
    text: str
    traceback: str
    place: str
    at_s: float


@dataclass
class RankState:
    """The state of one rank; `receive` gets all of its reports, in order."""

    rank: int
    world_size: int
    calls: list[Call] = field(default_factory=list)  # begun since the last removal
    open: dict[int, Call] = field(default_factory=dict)
    last: Call | None = None
    waits: dict[int, Wait] = field(default_factory=dict)  # by thread
    raised: Raised | None = None
    exit_code: int | None = None  # the script has ended
    exited: int | None = None  # its process has exited, with this code
    num_calls: int = 0
    called_bytes: float = 0.0  # sent by the best algorithm for them
    process_state: str = "R"
    cpu_share: float = 1.0  # of a core, since the last look
    starved_share: float = 0.0  # share of that time in which it was runnable without a core
    peak_bytes: int = 0
    stacks: dict[int, list[Frame]] = field(default_factory=dict)
    received_at: float = 0.0  # time of its last report, on rank 0's clock
    sockets: dict[tuple[Any, ...], int] = field(default_factory=dict)
    counting: bool = True  # whether calls count: in a proof only those of the steps
    has_default_group: bool = False  # it has created the group of all ranks
    history: History = field(default_factory=History)
    trained_elements: int = 0  # elements that its optimizers step
    exchanged_elements: int = 0  # floating-point elements that it has passed to collectives
    starts_processes_at: CallPlace | None = None  # the first place where it starts processes
    counts_gpus_at: CallPlace | None = None  # where it asks for the number of GPUs, and gets one per rank
    counted_steps: int = 0  # of a proof; `sockets` then has only what they sent
    reports_end: bool = False  # whether it always reports its end; otherwise a script that exits with 0 is fine
    missing: str = ""  # why nothing is known of it, after "rank 2 "

    def __post_init__(self) -> None:
        self._places: dict[int, CallPlace] = {}
        self._groups: dict[int, GroupKey] = {}
        self._kinds: dict[int, Kind] = {}
        self._known_calls: dict[int, Call] = {}
        self._main = 0
        self._next_seqs: dict[Any, int] = {}
        self._last_look: tuple[float, float, float] | None = None

    def receive(self, report: list[Any], now: float) -> bool:
        """Process one report of the rank, received at `now`; return whether it belongs to its state, not to a fault.
        Raises any exception if it is malformed."""
        kind, *values = report
        if kind not in ("look", "stacks"):
            self.received_at = now
        handler = getattr(self, f"_on_{kind}", None)
        if handler is not None:
            handler(*typed(values, list(get_type_hints(handler).values())[:-1]))
        return handler is not None

    def _on_place(
        self, number: int, line: str, below: str, file: str, typed: str = "", called_by: str = "", callers: str = "",
        in_thread: bool = False, package: str = "",
    ) -> None:  # fmt: skip
        self._places[number] = CallPlace(line, below, file, typed, called_by, callers, in_thread, package)

    def _on_group(self, number: int, ranks: list[int], name: str, instance: int) -> None:
        self._groups[number] = GroupKey(tuple(ranks), name, instance)

    def _on_kind(
        self, number: int, op: str, dims: list[list[int]], dtypes: list[str], reduce: str, root: int, peer: int,
        tag: int, nbytes: int, splits: list[list[int]], parameter: str = "",
    ) -> None:  # fmt: skip
        shapes, parts = tuple(map(tuple, dims)), tuple(map(tuple, splits))
        self._kinds[number] = Kind(op, shapes, tuple(dtypes), reduce, root, peer, tag, nbytes, parts, parameter)

    def _on_call(self, number: int, place: int, group: int, kind: int, seq: int, thread: int, at_s: float) -> None:
        found = self._kinds[kind]
        if seq < 0:
            seq = self._next_seq((self._groups[group], found.op, found.peer, found.tag))
        reached = self.history.now
        call = Call(self.rank, self._places[place], self._groups[group], found, seq, thread, at_s, reached=reached)
        self.open[number] = self._known_calls[number] = self.last = call
        if len(self._known_calls) > MOST_KNOWN_CALLS:
            del self._known_calls[next(iter(self._known_calls))]
        self.calls.append(call)
        self.num_calls += 1
        if len(call.group.ranks) > 1 and any("float" in each for each in found.dtypes):
            self.exchanged_elements += sum(map(math.prod, found.dims))
        if self.counting:
            self.called_bytes += called_bytes(found, len(call.group.ranks), self.rank)

    def _on_end(self, number: int, at_s: float) -> None:
        call = self.open.pop(number, None)
        if call is not None:
            call.ended_s = at_s

    def _on_wait(self, number: int, thread: int, at_s: float) -> None:
        call = self._known_calls.get(number) if number >= 0 else next(iter(self.open.values()), None)
        if call is not None:
            self.waits[thread] = Wait(call, call_text(call), call.place, at_s)

    def _on_waited(self, number: int, thread: int, at_s: float) -> None:
        if number >= 0:
            self._on_end(number, at_s)
            self._known_calls.pop(number, None)
        self.waits.pop(thread, None)

    def _on_enter(self, name: str, arguments: list[Any], place: int, thread: int, at_s: float) -> None:
        world = tuple(range(self.world_size))
        if name == "new_group":
            ranks = tuple(range(self.world_size) if arguments[0] is None else arguments[0])
            key = GroupKey(ranks if arguments[1] else world, instance=MADE)
            kind = Kind("new_group", (ranks,))
        elif name == "init_process_group":
            self.has_default_group = True
            size, rank = arguments or (-1, -1)
            size = size if rank == self.rank < size < self.world_size else self.world_size
            key, kind = GroupKey(world[:size], instance=INITIALISED), Kind(name)
        else:
            self.waits[thread] = Wait(None, f"{name}({', '.join(map(repr, arguments))})", self._places[place], at_s)
            return
        call = Call(self.rank, self._places[place], key, kind, self._next_seq(key), thread, at_s)
        self.calls.append(call)
        self.waits[thread] = Wait(call, call_text(call), call.place, at_s)

    def _on_starts(self, place: int) -> None:
        self.starts_processes_at = self.starts_processes_at or self._places[place]

    def _on_counts(self, place: int) -> None:
        self.counts_gpus_at = self.counts_gpus_at or self._places[place]

    def _on_leave(self, thread: int, at_s: float) -> None:
        wait = self.waits.pop(thread, None)
        if wait is not None and wait.call is not None:
            wait.call.ended_s = at_s

    def _on_main(self, thread: int) -> None:
        self._main = thread

    def _on_step(self, steps: int, place: int = -1) -> None:
        found = self._places.get(place, CallPlace())
        self.history.step(steps, found.framework, found.package)

    def _on_trains(self, elements: int) -> None:
        self.trained_elements += elements

    def _on_backward(self, backwards: int) -> None:
        self.history.set_backwards(backwards)

    def _on_pass(self, number: int, place: int, length: int) -> None:
        at = self._places[place]
        self.history.begin_pass(number, at.line, at.file, length, at.callers)

    def _on_fetched(self, number: int, count: int, ended: bool) -> None:
        if ended:
            self.history.end_pass(number)
        else:
            self.history.read_batch(number, count)

    def _on_raised(self, kind: str, text: str, traceback: str, place: str, at_s: float) -> None:
        self.raised = Raised(kind, text, traceback, place, at_s)

    def _on_ended(self, code: int, at_s: float) -> None:  # noqa: ARG002
        self.exit_code = code

    def _on_gone(self, code: int) -> None:
        self.exited = code

    def _on_look(self, process_state: str, cpu_s: float, peak_bytes: int, starved_s: float, at_s: float) -> None:
        self.process_state, self.peak_bytes = process_state, peak_bytes
        if self._last_look is not None and (for_s := at_s - self._last_look[2]) > 0:
            self.cpu_share, self.starved_share = (
                (cpu_s - self._last_look[0]) / for_s,
                (starved_s - self._last_look[1]) / for_s,
            )
        self._last_look = cpu_s, starved_s, at_s

    def _on_stacks(self, stacks: dict[str, list[list[Any]]]) -> None:
        self.stacks = {int(thread): [Frame(*each) for each in frames] for thread, frames in stacks.items()}

    def _on_counting(self, counting: bool) -> None:
        self.counting = counting

    def _on_wire(self, steps: int, found: list[list[Any]]) -> None:
        self.counted_steps = steps
        self.sockets = {(tuple(near), tuple(far)): sent for near, far, sent in found}

    def _on_sockets(self, found: list[list[Any]]) -> None:
        if not self.counting or self.counted_steps:
            return
        for near, far, sent in found:
            key = tuple(near), tuple(far)
            self.sockets[key] = max(sent, self.sockets.get(key, 0))

    def place(self, number: int) -> CallPlace:
        return self._places[number]

    def known_call(self, number: int) -> Call | None:
        """Return a call whose handle may still be used."""
        return self._known_calls.get(number)

    def group(self, number: int) -> GroupKey:
        return self._groups[number]

    def _next_seq(self, key: Any) -> int:
        seq = self._next_seqs.get(key, 0)
        self._next_seqs[key] = seq + 1
        return seq

    @property
    def steps(self) -> int:
        """Return the number of optimizer steps."""
        return self.history.now.steps

    @property
    def over(self) -> bool:
        """Return whether its script makes no more calls."""
        ended = self.exit_code is not None or self.exited is not None or self.raised is not None
        return ended or bool(self.missing)

    def waiting(self, absent: Callable[[Call], object]) -> Wait | None:
        """Return what it waits in; None if it has ended, is busy or asleep. Among open calls, one from which a rank is
        `absent`."""
        if self.over:
            return None
        main_wait = self.waits.get(self._main)
        if main_wait is not None and (main_wait.call is None or absent(main_wait.call)):
            return main_wait  # else it is over, which the next call reports
        if not self.frames():
            return None
        file = self.frames()[0].file
        others = [wait for wait in self.waits.values() if wait.call is None or absent(wait.call)]
        if others and any(each in file for each in LIBRARY_WAITS):
            return others[0]
        in_torch = "/torch/" in file and LOADERS not in file
        if in_torch and self.is_idle:
            for call in sorted(self.open.values(), key=lambda each: each.began_s):
                if absent(call):
                    return Wait(call, call_text(call), call.place, call.began_s)
        return None

    @property
    def left_early(self) -> bool:
        """Return whether its process exited before reporting its end."""
        return self.exit_code is None and self.exited is not None and (self.exited != 0 or self.reports_end)

    @property
    def is_idle(self) -> bool:
        """Return whether it neither computes nor waits for a core."""
        return self.cpu_share + self.starved_share < IDLE_SHARE

    def frames(self) -> list[Frame]:
        """Return the main thread's stack, innermost frame first."""
        return self.stacks.get(self._main, [])


def typed(values: list[Any], hints: list[Any]) -> list[Any]:
    """Return the values; raises TypeError if one does not have its hinted type (only the outer type is checked)."""
    for value, hint in zip(values, hints, strict=False):
        if hint is not Any and type(value) not in ((int, float) if hint is float else (get_origin(hint) or hint,)):
            raise TypeError(f"{value!r} is no {hint}")
    return values


def ranks_by(values: Mapping[int, Value]) -> dict[Value, list[int]]:
    """Return the ranks by value, the value of the lowest rank first."""
    found: dict[Value, list[int]] = {}
    for rank in sorted(values):
        found.setdefault(values[rank], []).append(rank)
    return found


def ranks_do(ranks: Iterable[int], verb: str) -> str:
    """ "rank 2 waits", or "ranks 0 and 1 wait"."""
    found = list(ranks)
    return f"{name_ranks(found)} {verb}{'s' if len(found) == 1 else ''}"


def group_text(group: GroupKey, world_size: int) -> str:
    """Return "all ranks", or which."""
    if len(group.ranks) == world_size and not group.name:
        return "all ranks"
    if group.name.isdigit():  # torch's number for it
        return f"group {group.name} ({name_ranks(group.ranks)})"
    return f"the group of {name_ranks(group.ranks)}"


def call_text(call: Call) -> str:
    """Return the call in words for a sentence."""
    counted = f"{call.kind.op} #{call.seq}" if call.seq >= 0 else call.kind.op
    if call.kind.op == "send":
        return f"{counted} to {f'rank {call.kind.peer}' if call.kind.peer >= 0 else 'another rank'}"
    if call.kind.op == "recv":
        return f"{counted} from {f'rank {call.kind.peer}' if call.kind.peer >= 0 else 'any rank'}"
    return f"{call.place.object_call} ({counted})" if call.place.object_call else counted


def called_bytes(kind: Kind, size: int, rank: int) -> float:
    """Return the bytes that a rank sends for a call of this kind in a group of this size; the mean if ranks differ."""
    if kind.op in ("recv", "barrier"):
        return 0.0
    if kind.op == "gather":
        return float(kind.nbytes if kind.root != rank else 0)
    return sent_bytes(kind.op, kind.nbytes, size)


# A finding of check: a sentence that can be acted on, the ranks, and both sides as a table.

# The checks of a run in the order of the verdict; each passes if it has no finding.
MATCH, HANG, END = "calls match", "nothing hangs", "the script ends well"
WAITED, AT_REST = "handles are waited for", "tensors are at rest in flight"
REPLICAS, DATA = "replicas agree", "ranks train on their own data"
DROPOUT, DEVICES = "dropout agrees", "a device a rank"
CHECKS = (MATCH, HANG, END, WAITED, AT_REST, REPLICAS, DATA, DROPOUT, DEVICES)


@dataclass(frozen=True)
class Finding:
    """`ends` is whether the run cannot succeed any more, so that it is ended."""

    check: str
    sentence: str
    ranks: tuple[int, ...] = ()
    rows: Sequence[Sequence[str]] = field(default=())  # rank, place, call, ranks waited for, text of the line
    ends: bool = False
    traceback: str = ""
