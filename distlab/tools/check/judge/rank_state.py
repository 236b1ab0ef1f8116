"""What one rank's script has told, as the doctor of rank 0 knows it: its open calls, what it waits in, how it ended.

A rank waits where a thread of it has entered a wait and not left it. C++ that waits tells nothing (DDP's reducer in the
backward pass): then a call is open, the process has no processor time, and its main thread stands in a frame of
torch's. Whoever stands in a line of the script itself, asleep or at work, waits for nobody.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar, get_origin, get_type_hints

from distlab.lab.cluster import name_ranks
from distlab.lab.measure.traffic import sent_bytes
from distlab.tools.check.judge.progress import NOWHERE, Course, Progress

IDLE_SHARE = 0.05  # of a core, over the last look: who has less computes nothing
LIBRARY_WAITS = ("threading.py", "queue.py", "selectors.py", "concurrent/futures/")  # for another thread of the script
ENGINE = "_engine_run_backward"
IN_A_THREAD = ", in a thread of its own"
OBJECTS = ("_object", "_object_list")
LOADERS = "torch/utils/data/"
MADE, INITIALISED = -1, -2  # instances of what is no collective of the group, and met by all its ranks
KNOWN = 50_000  # calls whose handles may still be spoken of
Value = TypeVar("Value")


class CallPlace(NamedTuple):
    """A line of the script, and what lies between it and the call; any part may be empty."""

    line: str = ""
    below: str = ""  # the library's line that made the call, or torch's function for Python objects
    file: str = ""
    typed: str = ""  # the framework's function that the line calls
    called_by: str = ""  # the framework's function that called the line, and where the user called that
    callers: str = ""  # the user's own lines that called it, the nearest first
    in_thread: bool = False  # that Python started
    package: str = ""  # the framework's

    @property
    def named_call(self) -> str:
        """torch.distributed's function that the script called by its name, which makes calls; or empty."""
        return self.below.removesuffix(IN_A_THREAD) if self.below.startswith("torch.distributed.") else ""

    @property
    def object_call(self) -> str:
        """torch.distributed's function for Python objects that the script called, which makes calls of tensors; or
        empty."""
        return self.below if self.below.endswith(OBJECTS) else ""

    @property
    def framework(self) -> str:
        """The framework's function that the user called, above the line or in it."""
        return self.called_by.partition(" at ")[0] or self.typed

    def __str__(self) -> str:
        below = "the backward pass" if ENGINE in self.below else self.below
        below = "" if self.object_call else below
        if self.typed:
            below = f"{self.typed} in {below}" if ENGINE in self.below else self.typed
        text = f"{self.line} in {below}" if self.line and below else self.line or below or "?"
        return f"{text}, called by {self.called_by}" if self.called_by else text


class GroupKey(NamedTuple):
    """A process group: its ranks, torch's name for it (none for the default group), and the how-manieth of this name it
    is; below 0 what is no collective."""

    ranks: tuple[int, ...]
    name: str = ""
    instance: int = 0

    def __hash__(self) -> int:
        """Of a part of the ranks: a hash of all of them took most of the time of a job of 512."""
        return hash((self.ranks[:4], len(self.ranks), self.name, self.instance))


class Kind(NamedTuple):
    """All that calls which meet each other have to have alike, and the bytes of the whole tensor."""

    op: str
    dims: tuple[tuple[int, ...], ...] = ()
    dtypes: tuple[str, ...] = ()
    reduce: str = ""
    root: int = -1
    peer: int = -1
    tag: int = 0
    nbytes: int = 0
    splits: tuple[tuple[int, ...], ...] = ()
    parameter: str = ""  # of which a weight or a gradient is given by hand; ranks need not have it alike


@dataclass(slots=True)
class Call:
    """One call of one rank; `turn` is its number in its group, or among the messages of the same two ends; below 0
    where that is not known."""

    rank: int
    place: CallPlace
    group: GroupKey
    kind: Kind
    turn: int
    thread: int
    began_s: float
    ended_s: float | None = None
    reached: Progress = NOWHERE  # before it


class Frame(NamedTuple):
    """A line of a Python stack."""

    file: str
    line: int
    function: str


class Wait(NamedTuple):
    """What a thread waits in: a call, or a function of another kind in its own words."""

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
    """One rank; `take` is given all that it tells, in order."""

    rank: int
    world_size: int
    calls: list[Call] = field(default_factory=list)  # begun since they were last taken away
    open: dict[int, Call] = field(default_factory=dict)
    last: Call | None = None
    waits: dict[int, Wait] = field(default_factory=dict)  # by thread
    raised: Raised | None = None
    exit_code: int | None = None  # the script has ended
    gone: int | None = None  # its process is gone, with this exit code
    num_calls: int = 0
    called_bytes: float = 0.0  # what the best algorithm sends for them
    state: str = "R"
    cpu_share: float = 1.0  # of a core, since the look before
    starved_share: float = 0.0  # of the same time, in which it could have run and had no core
    peak_bytes: int = 0
    stacks: dict[int, list[Frame]] = field(default_factory=dict)
    moved_at: float = 0.0  # the last time that it told anything, on the clock of rank 0's doctor
    sockets: dict[tuple[Any, ...], int] = field(default_factory=dict)
    counting: bool = True  # whether what is called counts: in a proof the steps alone
    grouped: bool = False  # it has made the group of all ranks
    course: Course = field(default_factory=Course)
    trained: int = 0  # elements of what its optimizers step
    exchanged: int = 0  # elements of numbers with fractions that it has given to collectives
    starts: CallPlace | None = None  # where it starts processes of its own, the first of them
    counts: CallPlace | None = None  # where it asks how many GPUs there are, and is told of one a rank
    counted_steps: int = 0  # of a proof; then `sockets` has what they sent, and nothing else
    promises: bool = False  # to tell how it has ended: of a script that leaves with 0 nothing more is asked
    missing: str = ""  # why nothing is known of it, behind "rank 2 "

    def __post_init__(self) -> None:
        self._places: dict[int, CallPlace] = {}
        self._groups: dict[int, GroupKey] = {}
        self._kinds: dict[int, Kind] = {}
        self._known: dict[int, Call] = {}
        self._main = 0
        self._turns: dict[Any, int] = {}
        self._looked: tuple[float, float, float] | None = None

    def take(self, told: list[Any], now: float) -> bool:
        """One line that the rank told, at `now`: whether it is of its state, and no fact for a fault. Raises an
        exception of any kind where it is not as it is written."""
        kind, *values = told
        if kind not in ("look", "stacks"):
            self.moved_at = now
        handler = getattr(self, f"_take_{kind}", None)
        if handler is not None:
            handler(*typed(values, list(get_type_hints(handler).values())[:-1]))
        return handler is not None

    def _take_place(
        self, number: int, line: str, below: str, file: str, typed: str = "", called_by: str = "", callers: str = "",
        in_thread: bool = False, package: str = "",
    ) -> None:  # fmt: skip
        self._places[number] = CallPlace(line, below, file, typed, called_by, callers, in_thread, package)

    def _take_group(self, number: int, ranks: list[int], name: str, instance: int) -> None:
        self._groups[number] = GroupKey(tuple(ranks), name, instance)

    def _take_kind(
        self, number: int, op: str, dims: list[list[int]], dtypes: list[str], reduce: str, root: int, peer: int,
        tag: int, nbytes: int, splits: list[list[int]], parameter: str = "",
    ) -> None:  # fmt: skip
        shapes, parts = tuple(map(tuple, dims)), tuple(map(tuple, splits))
        self._kinds[number] = Kind(op, shapes, tuple(dtypes), reduce, root, peer, tag, nbytes, parts, parameter)

    def _take_call(self, number: int, place: int, group: int, kind: int, turn: int, thread: int, at_s: float) -> None:
        found = self._kinds[kind]
        if turn < 0:
            turn = self._turn((self._groups[group], found.op, found.peer, found.tag))
        reached = self.course.now
        call = Call(self.rank, self._places[place], self._groups[group], found, turn, thread, at_s, reached=reached)
        self.open[number] = self._known[number] = self.last = call
        if len(self._known) > KNOWN:
            del self._known[next(iter(self._known))]
        self.calls.append(call)
        self.num_calls += 1
        if len(call.group.ranks) > 1 and any("float" in each for each in found.dtypes):
            self.exchanged += sum(map(math.prod, found.dims))
        if self.counting:
            self.called_bytes += called_bytes(found, len(call.group.ranks), self.rank)

    def _take_end(self, number: int, at_s: float) -> None:
        call = self.open.pop(number, None)
        if call is not None:
            call.ended_s = at_s

    def _take_wait(self, number: int, thread: int, at_s: float) -> None:
        call = self._known.get(number) if number >= 0 else next(iter(self.open.values()), None)
        if call is not None:
            self.waits[thread] = Wait(call, call_text(call), call.place, at_s)

    def _take_waited(self, number: int, thread: int, at_s: float) -> None:
        if number >= 0:
            self._take_end(number, at_s)
            self._known.pop(number, None)
        self.waits.pop(thread, None)

    def _take_enter(self, name: str, what: list[Any], place: int, thread: int, at_s: float) -> None:
        world = tuple(range(self.world_size))
        if name == "new_group":
            ranks = tuple(range(self.world_size) if what[0] is None else what[0])
            key = GroupKey(ranks if what[1] else world, instance=MADE)
            kind = Kind("new_group", (ranks,))
        elif name == "init_process_group":
            self.grouped = True
            size, rank = what or (-1, -1)
            size = size if rank == self.rank < size < self.world_size else self.world_size
            key, kind = GroupKey(world[:size], instance=INITIALISED), Kind(name)
        else:
            self.waits[thread] = Wait(None, f"{name}({', '.join(map(repr, what))})", self._places[place], at_s)
            return
        call = Call(self.rank, self._places[place], key, kind, self._turn(key), thread, at_s)
        self.calls.append(call)
        self.waits[thread] = Wait(call, call_text(call), call.place, at_s)

    def _take_starts(self, place: int) -> None:
        self.starts = self.starts or self._places[place]

    def _take_counts(self, place: int) -> None:
        self.counts = self.counts or self._places[place]

    def _take_leave(self, thread: int, at_s: float) -> None:
        wait = self.waits.pop(thread, None)
        if wait is not None and wait.call is not None:
            wait.call.ended_s = at_s

    def _take_main(self, thread: int) -> None:
        self._main = thread

    def _take_step(self, steps: int, place: int = -1) -> None:
        found = self._places.get(place, CallPlace())
        self.course.step(steps, found.framework, found.package)

    def _take_trains(self, elements: int) -> None:
        self.trained += elements

    def _take_backward(self, backwards: int) -> None:
        self.course.make_backward(backwards)

    def _take_pass(self, turn: int, place: int, length: int) -> None:
        at = self._places[place]
        self.course.begin_pass(turn, at.line, at.file, length, at.callers)

    def _take_fetched(self, turn: int, count: int, ended: bool) -> None:
        if ended:
            self.course.end_pass(turn)
        else:
            self.course.draw(turn, count)

    def _take_raised(self, kind: str, text: str, traceback: str, place: str, at_s: float) -> None:
        self.raised = Raised(kind, text, traceback, place, at_s)

    def _take_ended(self, code: int, at_s: float) -> None:  # noqa: ARG002
        self.exit_code = code

    def _take_gone(self, code: int) -> None:
        self.gone = code

    def _take_look(self, state: str, cpu_s: float, peak_bytes: int, starved_s: float, at_s: float) -> None:
        self.state, self.peak_bytes = state, peak_bytes
        if self._looked is not None and (for_s := at_s - self._looked[2]) > 0:
            self.cpu_share, self.starved_share = (
                (cpu_s - self._looked[0]) / for_s,
                (starved_s - self._looked[1]) / for_s,
            )
        self._looked = cpu_s, starved_s, at_s

    def _take_stacks(self, stacks: dict[str, list[list[Any]]]) -> None:
        self.stacks = {int(thread): [Frame(*each) for each in frames] for thread, frames in stacks.items()}

    def _take_counting(self, counting: bool) -> None:
        self.counting = counting

    def _take_wire(self, steps: int, found: list[list[Any]]) -> None:
        self.counted_steps = steps
        self.sockets = {(tuple(near), tuple(far)): sent for near, far, sent in found}

    def _take_sockets(self, found: list[list[Any]]) -> None:
        if not self.counting or self.counted_steps:
            return
        for near, far, sent in found:
            key = tuple(near), tuple(far)
            self.sockets[key] = max(sent, self.sockets.get(key, 0))

    def place(self, number: int) -> CallPlace:
        return self._places[number]

    def known_call(self, number: int) -> Call | None:
        """A call whose handle may still be spoken of."""
        return self._known.get(number)

    def group(self, number: int) -> GroupKey:
        return self._groups[number]

    def _turn(self, key: Any) -> int:
        turn = self._turns.get(key, 0)
        self._turns[key] = turn + 1
        return turn

    @property
    def steps(self) -> int:
        """Of its optimizers."""
        return self.course.now.steps

    @property
    def over(self) -> bool:
        """Whether its script calls nothing any more."""
        ended = self.exit_code is not None or self.gone is not None or self.raised is not None
        return ended or bool(self.missing)

    def waiting(self, absent: Callable[[Call], object]) -> Wait | None:
        """What it waits in; None where it is over, or at work, or asleep. Of open calls it is one that somebody is
        `absent` from."""
        if self.over:
            return None
        told = self.waits.get(self._main)
        if told is not None and (told.call is None or absent(told.call)):
            return told  # else it is over, and that is told with the next call
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
        """Whether its process is gone before it had ended, as it has to."""
        return self.exit_code is None and self.gone is not None and (self.gone != 0 or self.promises)

    @property
    def is_idle(self) -> bool:
        """Whether it neither computes nor waits for a core."""
        return self.cpu_share + self.starved_share < IDLE_SHARE

    def frames(self) -> list[Frame]:
        """The stack of the main thread, innermost frame first."""
        return self.stacks.get(self._main, [])


def typed(values: list[Any], hints: list[Any]) -> list[Any]:
    """The same values; raises TypeError for one of another type than its hint, which is an outer one alone."""
    for value, hint in zip(values, hints, strict=False):
        if hint is not Any and type(value) not in ((int, float) if hint is float else (get_origin(hint) or hint,)):
            raise TypeError(f"{value!r} is no {hint}")
    return values


def ranks_by(values: Mapping[int, Value]) -> dict[Value, list[int]]:
    """The ranks that have each value, the value of the lowest rank first."""
    found: dict[Value, list[int]] = {}
    for rank in sorted(values):
        found.setdefault(values[rank], []).append(rank)
    return found


def ranks_do(ranks: Iterable[int], verb: str) -> str:
    """ "rank 2 waits", or "ranks 0 and 1 wait"."""
    found = list(ranks)
    return f"{name_ranks(found)} {verb}{'s' if len(found) == 1 else ''}"


def group_words(group: GroupKey, world_size: int) -> str:
    """ "all ranks", or which."""
    if len(group.ranks) == world_size and not group.name:
        return "all ranks"
    if group.name.isdigit():  # torch counts them
        return f"group {group.name} ({name_ranks(group.ranks)})"
    return f"the group of {name_ranks(group.ranks)}"


def call_text(call: Call) -> str:
    """The call in the words of a sentence."""
    counted = f"{call.kind.op} #{call.turn}" if call.turn >= 0 else call.kind.op
    if call.kind.op == "send":
        return f"{counted} to {f'rank {call.kind.peer}' if call.kind.peer >= 0 else 'another rank'}"
    if call.kind.op == "recv":
        return f"{counted} from {f'rank {call.kind.peer}' if call.kind.peer >= 0 else 'any rank'}"
    return f"{call.place.object_call} ({counted})" if call.place.object_call else counted


def called_bytes(kind: Kind, size: int, rank: int) -> float:
    """What a rank has to send for a call of this kind in a group of this size; on average where ranks differ."""
    if kind.op in ("recv", "barrier"):
        return 0.0
    if kind.op == "gather":
        return float(kind.nbytes if kind.root != rank else 0)
    return sent_bytes(kind.op, kind.nbytes, size)


# What the doctor has found: a sentence that can be acted on, whose it is, and both sides as a table.

# What is looked for, in the order of the verdict; each is a check of the run, which holds where nothing was found.
MATCH, HANG, END = "calls match", "nothing hangs", "the script ends well"
WAITED, AT_REST = "handles are waited for", "tensors are at rest in flight"
REPLICAS, DATA = "replicas agree", "ranks train on their own data"
DROPOUT, DEVICES = "dropout agrees", "a device a rank"
CHECKS = (MATCH, HANG, END, WAITED, AT_REST, REPLICAS, DATA, DROPOUT, DEVICES)


@dataclass(frozen=True)
class Finding:
    """`ends` is whether the run can only go wrong from here on, so that it is ended."""

    check: str
    sentence: str
    ranks: tuple[int, ...] = ()
    rows: Sequence[Sequence[str]] = field(default=())  # rank, where it is, in which call, for whom, the line's text
    ends: bool = False
    traceback: str = ""
