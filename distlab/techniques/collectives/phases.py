"""Phases: where a rank's time went, marked in the mechanisms and read by whoever measures.

    with phase("forward", "3"): ...         # in a mechanism: microbatch 3
    with recorded() as spans: step()        # around a step: what ran in it, and when
    with slowed(0.5): step()                # around a step: as on a processor of half the speed
    with heard(listener): step()            # around a step: each begin and end, when it comes

A mark costs under a microsecond, whether somebody records or not, so it may stay in for the timed steps. On CUDA,
where a call returns before its kernels have run, `recorded(device)` takes the times of the device: an event at both
ends of each phase, read when the block is over. What hears (`heard`) is told when the processor launches.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from itertools import count
from types import TracebackType
from typing import Any, Generic, NamedTuple, TypeVar

import torch

COMPUTE = ("forward", "backward", "input", "weight")  # what a slower processor would take longer for


class Span(NamedTuple):
    """A stretch of one rank's time, in seconds of `time.perf_counter`. Spans nest: an all_reduce inside a forward
    pass."""

    # data, forward, backward (or its parts, input and weight), send, receive, all_reduce, all_gather, reduce_scatter,
    # optimizer or wait
    kind: str
    label: str  # the microbatch, where it has one
    start_s: float
    end_s: float


T = TypeVar("T")


# As torch's own profiler is: a mechanism should not have to hand a recorder down to where the time goes.
class Ambient(Generic[T]):
    """A value of this thread, and of the backward passes that it runs: on CUDA autograd has a thread for each device,
    which knows nothing of the context of who called it, and the caller waits meanwhile."""

    def __init__(self, name: str, nothing: T) -> None:
        self._of_thread: ContextVar[T] = ContextVar(name, default=nothing)
        self._nothing = self._newest = nothing

    def get(self) -> T:
        found = self._of_thread.get()
        if found is self._nothing and self._newest is not found and torch._C._current_graph_task_id() != -1:
            return self._newest
        return found

    @contextmanager
    def set_to(self, value: T) -> Iterator[None]:
        token, before = self._of_thread.set(value), self._newest
        self._newest = value
        try:
            yield
        finally:
            self._of_thread.reset(token)
            self._newest = before


class DeviceClock:
    """Reads what a CUDA device did when, in seconds of `time.perf_counter`; nothing waits until it is read."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        torch.cuda.synchronize(device)
        self._began_s = time.perf_counter()  # before the event: what is read is never late
        self._begin = self.mark()

    def mark(self) -> Any:
        event: Any = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def read(self, mark: Any) -> float:
        """When the device came to `mark`, which has to be over (`torch.cuda.synchronize`)."""
        elapsed_ms: float = self._begin.elapsed_time(mark)
        return self._began_s + elapsed_ms / 1000


class Recorder:
    """The `spans` of a block, in the order of their ends; of a device complete once `read` was called."""

    def __init__(self, clock: DeviceClock | None) -> None:
        self.spans: list[Span] = []
        self.clock = clock
        self._marks: list[tuple[Any, Any]] = []  # of the device, at both ends of each span

    def add(self, span: Span, begin: Any) -> None:
        if self.clock is not None and begin is None:
            return  # it began before the block
        self.spans.append(span)
        if self.clock is not None:
            self._marks.append((begin, self.clock.mark()))

    def read(self) -> None:
        """Turn launches into what the device did: never before it was asked for, nor before the begin."""
        if self.clock is None:
            return
        torch.cuda.synchronize(self.clock.device)
        for index, (span, marks) in enumerate(zip(self.spans, self._marks, strict=True)):
            begin_s, end_s = map(self.clock.read, marks)
            start_s = max(span.start_s, begin_s)
            self.spans[index] = span._replace(start_s=start_s, end_s=max(start_s, end_s))


_recorder: Ambient[Recorder | None] = Ambient("recorder", None)
_listener: Ambient[Callable[[str, str, str], None] | None] = Ambient("listener", None)
# Around the steps of each collective by hand: its operation, the group's ranks, what this rank gives, what it gets.
AroundCollective = Callable[..., Any]
_around: Ambient[AroundCollective | None] = Ambient("around", None)
_lag = Ambient("lag", 0.0)  # seconds to sleep for a second of compute


class phase:  # noqa: N801  it is used like a function
    """`with phase(kind, label):` marks what runs inside, for the recorder of this thread if there is one."""

    __slots__ = ("begin", "busy_s", "kind", "label", "start_s")

    def __init__(self, kind: str, label: str = "") -> None:
        self.kind, self.label = kind, label

    def __enter__(self) -> None:
        listener = _listener.get()
        if listener is not None:
            listener("begin", self.kind, self.label)
        self.start_s = time.perf_counter()
        recorder = _recorder.get()
        self.begin = recorder.clock.mark() if recorder is not None and recorder.clock is not None else None
        if _lag.get() and self.kind in COMPUTE:
            self.busy_s = time.thread_time()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        lag = _lag.get()
        if lag and self.kind in COMPUTE and error is None:
            time.sleep(lag * (time.thread_time() - self.busy_s))
        recorder = _recorder.get()
        if recorder is not None:
            recorder.add(Span(self.kind, self.label, self.start_s, time.perf_counter()), self.begin)
        listener = _listener.get()
        if listener is not None:
            listener("end", self.kind, self.label)


@contextmanager
def marked(module: torch.nn.Module) -> Iterator[None]:
    """Mark both passes of each call of `module` inside the block, microbatch by microbatch, for a step that marks
    nothing itself. A backward pass begins with the gradient of what the module gave, and ends when autograd is done."""
    numbers, passing = count(), list[phase]()

    def enter(*_: Any) -> None:
        passing.append(phase("forward", str(next(numbers))))
        passing[-1].__enter__()

    def leave(_module: Any, _inputs: Any, output: torch.Tensor) -> None:
        forward = passing.pop()
        forward.__exit__(None, None, None)
        if output.requires_grad:
            output.register_hook(partial(back, phase("backward", forward.label)))

    def back(backward: phase, _gradient: torch.Tensor) -> None:
        backward.__enter__()
        torch.autograd.Variable._execution_engine.queue_callback(partial(backward.__exit__, None, None, None))

    hooks = (module.register_forward_pre_hook(enter), module.register_forward_hook(leave))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def recorded(device: torch.device | None = None) -> Iterator[list[Span]]:
    """The phases of this thread that end inside the block, in the order of their ends; an inner block hides an
    outer. Of a CUDA `device` the times are the device's, and the block ends when it has done all of them."""
    clock = DeviceClock(device) if device is not None and device.type == "cuda" else None
    recorder = Recorder(clock)
    with _recorder.set_to(recorder):
        yield recorder.spans
    recorder.read()


@contextmanager
def heard(listener: Callable[[str, str, str], None]) -> Iterator[None]:
    """Tell `listener` ("begin" or "end", kind, label) of every phase of this thread inside the block."""
    with _listener.set_to(listener):
        yield


@contextmanager
def collectives_seen(around: AroundCollective) -> Iterator[None]:
    """Have `around` make of the steps of each collective by hand those that are taken inside the block."""
    with _around.set_to(around):
        yield


def seen(op: str, ranks: Sequence[int], given: Any, result: Any, steps: Any, left: Any = None) -> Any:
    """The steps of a collective by hand, as whoever watches has them; `left` is what this rank keeps of its part."""
    around = _around.get()
    return steps if around is None else around(op, ranks, given, result, steps, left)


def watched() -> bool:
    """Whether somebody wants to know what collectives by hand send."""
    return _around.get() is not None


@contextmanager
def slowed(share: float) -> Iterator[None]:
    """Compute of this thread takes 1/share times as long: a forward or backward phase of c CPU seconds sleeps c(1/share
    - 1).

    The thread's CPU time counts and not the clock's, so that what a phase waited for, a message or a core, is not drawn
    out. With a share of 1 nothing sleeps. A phase is to begin and end inside the block, or outside.
    """
    with _lag.set_to(1 / share - 1):
        yield
