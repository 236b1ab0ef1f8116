"""Phases: where a rank's time went, marked in the mechanisms and read by whoever measures.

    with phase("forward", "3"): ...         # in a mechanism: microbatch 3
    with recorded() as spans: step()        # around a step: what ran in it, and when
    with slowed(0.5): step()                # around a step: as on a processor of half the speed
    with heard(listener): step()            # around a step: each begin and end, when it comes

A mark costs under a microsecond, whether somebody records or not, so it may stay in for the timed steps (`python -m
benchmarks.timeline` shows no difference to a bare step). Times are the processor's: on CUDA a phase ends when its
kernels are launched, not when they are done.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import TracebackType
from typing import NamedTuple

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


# Ambient, as torch's own profiler is: a mechanism should not have to hand a recorder down to where the time goes.
_recorder: ContextVar[list[Span] | None] = ContextVar("recorder", default=None)
_listener: ContextVar[Callable[[str, str, str], None] | None] = ContextVar("listener", default=None)
_lag: ContextVar[float] = ContextVar("lag", default=0.0)  # seconds to sleep for a second of compute


class phase:  # noqa: N801  it is used like a function
    """`with phase(kind, label):` marks what runs inside, for the recorder of this thread if there is one."""

    __slots__ = ("busy_s", "kind", "label", "start_s")

    def __init__(self, kind: str, label: str = "") -> None:
        self.kind, self.label = kind, label

    def __enter__(self) -> None:
        listener = _listener.get()
        if listener is not None:
            listener("begin", self.kind, self.label)
        self.start_s = time.perf_counter()
        if _lag.get() and self.kind in COMPUTE:
            self.busy_s = time.thread_time()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        lag = _lag.get()
        if lag and self.kind in COMPUTE and error is None:
            time.sleep(lag * (time.thread_time() - self.busy_s))
        spans = _recorder.get()
        if spans is not None:
            spans.append(Span(self.kind, self.label, self.start_s, time.perf_counter()))
        listener = _listener.get()
        if listener is not None:
            listener("end", self.kind, self.label)


@contextmanager
def recorded() -> Iterator[list[Span]]:
    """The phases of this thread that end inside the block, in the order of their ends; an inner block hides an
    outer."""
    spans: list[Span] = []
    token = _recorder.set(spans)
    try:
        yield spans
    finally:
        _recorder.reset(token)


@contextmanager
def heard(listener: Callable[[str, str, str], None]) -> Iterator[None]:
    """Tell `listener` ("begin" or "end", kind, label) of every phase of this thread inside the block."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


@contextmanager
def slowed(share: float) -> Iterator[None]:
    """Compute of this thread takes 1/share times as long: a forward or backward phase of c CPU seconds sleeps c(1/share
    - 1).

    The thread's CPU time counts and not the clock's, so that what a phase waited for, a message or a core, is not drawn
    out. With a share of 1 nothing sleeps. A phase is to begin and end inside the block, or outside.
    """
    token = _lag.set(1 / share - 1)
    try:
        yield
    finally:
        _lag.reset(token)
