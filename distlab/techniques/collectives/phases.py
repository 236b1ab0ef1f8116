"""Phases: marks in the techniques that record how a rank spends its time.

    with phase("forward", "3"): ...         # in a mechanism: microbatch 3
    with recorded() as spans: step()        # around a step: what ran in it, and when
    with slowed(0.5): step()                # around a step: as on a processor of half the speed
    with listening(listener): step()        # around a step: calls the listener at each begin and end

A mark costs less than a microsecond, recorded or not, so it stays in the timed steps. On CUDA, where a call returns
before its kernels have run, `recorded(device)` uses the device's times: an event at both ends of each phase, read after
the block. A listener is called when the processor launches.
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

COMPUTE = ("forward", "backward", "input", "weight")  # the kinds that a slower processor prolongs


class Span(NamedTuple):
    """An interval of one rank's time, in seconds of `time.perf_counter`. Spans nest: an all_reduce inside a forward
    pass."""

    # data, forward, backward (or its parts, input and weight), send, receive, all_reduce, all_gather, reduce_scatter,
    # optimizer or wait
    kind: str
    label: str  # the microbatch, if there is one
    start_s: float
    end_s: float


T = TypeVar("T")


# Like torch's own profiler, so that no technique has to pass a recorder down the call stack.
class Ambient(Generic[T]):
    """A value of this thread and of the backward passes that it runs: on CUDA autograd has one thread per device,
    without the caller's context, and the caller waits meanwhile."""

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
    """Clock of a CUDA device, in seconds of `time.perf_counter`; nothing waits until a mark is read."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        torch.cuda.synchronize(device)
        self._began_s = time.perf_counter()  # before the event, so that no reading is late
        self._begin = self.mark()

    def mark(self) -> Any:
        event: Any = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def read(self, mark: Any) -> float:
        """Return when the device reached `mark`, which must be over (`torch.cuda.synchronize`)."""
        elapsed_ms: float = self._begin.elapsed_time(mark)
        return self._began_s + elapsed_ms / 1000


class Recorder:
    """The `spans` of a block, in the order of their ends; on a device they are complete after `read`."""

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
        """Replace launch times by the device's times; no span begins before its launch or ends before it begins."""
        if self.clock is None:
            return
        torch.cuda.synchronize(self.clock.device)
        for index, (span, marks) in enumerate(zip(self.spans, self._marks, strict=True)):
            begin_s, end_s = map(self.clock.read, marks)
            start_s = max(span.start_s, begin_s)
            self.spans[index] = span._replace(start_s=start_s, end_s=max(start_s, end_s))


_recorder: Ambient[Recorder | None] = Ambient("recorder", None)
_listener: Ambient[Callable[[str, str, str], None] | None] = Ambient("listener", None)
# Called with each hand-written collective's operation, ranks, input, output and steps; returns the steps to run.
AroundCollective = Callable[..., Any]
_around: Ambient[AroundCollective | None] = Ambient("around", None)
_lag = Ambient("lag", 0.0)  # seconds to sleep per second of compute


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
    """Mark both passes of each call of `module` in the block, per microbatch, for a step without marks. A backward pass
    begins with the gradient of the module's output, and ends when autograd is done."""
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
    """Record the phases of this thread that end inside the block, in the order of their ends; an inner block hides an
    outer one. With a CUDA `device` the times are the device's, and the block ends when it has run everything."""
    clock = DeviceClock(device) if device is not None and device.type == "cuda" else None
    recorder = Recorder(clock)
    with _recorder.set_to(recorder):
        yield recorder.spans
    recorder.read()


@contextmanager
def listening(listener: Callable[[str, str, str], None]) -> Iterator[None]:
    """Call `listener` ("begin" or "end", kind, label) for every phase of this thread inside the block."""
    with _listener.set_to(listener):
        yield


@contextmanager
def observing_collectives(around: AroundCollective) -> Iterator[None]:
    """Pass the steps of each hand-written collective in the block through `around`."""
    with _around.set_to(around):
        yield


def observed_steps(op: str, ranks: Sequence[int], source: Any, result: Any, steps: Any, kept: Any = None) -> Any:
    """Return a collective's steps, wrapped by the observer if there is one; `kept` is the part that this rank keeps."""
    around = _around.get()
    return steps if around is None else around(op, ranks, source, result, steps, kept)


def is_observed() -> bool:
    """Return whether hand-written collectives are observed."""
    return _around.get() is not None


@contextmanager
def slowed(speed: float) -> Iterator[None]:
    """Make compute of this thread take 1/speed times as long: a phase of c CPU seconds sleeps c(1/speed - 1).

    CPU time counts, not the clock, so waiting for a message or a core is not prolonged. At full speed, 1, nothing
    sleeps. A phase must begin and end inside the block, or outside.
    """
    with _lag.set_to(1 / speed - 1):
        yield
