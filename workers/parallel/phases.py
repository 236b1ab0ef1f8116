"""Phases: where a rank's time went, marked in the mechanisms and read by whoever measures.

    with phase("forward", "3"): ...         # in a mechanism: microbatch 3
    with recorded() as spans: step()        # around a step: what ran in it, and when

A mark costs under a microsecond, whether somebody records or not, so it may stay in for the timed steps (`python -m
benchmarks.timeline` shows no difference to a bare step). Times are the processor's: on CUDA a phase ends when its kernels
are launched, not when they are done.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import TracebackType
from typing import NamedTuple


class Span(NamedTuple):
    """A stretch of one rank's time, in seconds of `time.perf_counter`. Spans nest: an all_reduce inside a forward pass."""

    kind: str  # data, forward, backward, send, receive, all_reduce, all_gather, reduce_scatter, optimizer or wait
    label: str  # the microbatch, where it has one
    start_s: float
    end_s: float


# Ambient, as torch's own profiler is: a mechanism should not have to hand a recorder down to where the time goes.
_recorder: ContextVar[list[Span] | None] = ContextVar("recorder", default=None)


class phase:  # noqa: N801  it is used like a function
    """`with phase(kind, label):` marks what runs inside, for the recorder of this thread if there is one."""

    __slots__ = ("kind", "label", "start_s")

    def __init__(self, kind: str, label: str = "") -> None:
        self.kind, self.label = kind, label

    def __enter__(self) -> None:
        self.start_s = time.perf_counter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        spans = _recorder.get()
        if spans is not None:
            spans.append(Span(self.kind, self.label, self.start_s, time.perf_counter()))


@contextmanager
def recorded() -> Iterator[list[Span]]:
    """The phases of this thread that end inside the block, in the order of their ends; an inner block hides an outer."""
    spans: list[Span] = []
    token = _recorder.set(spans)
    try:
        yield spans
    finally:
        _recorder.reset(token)
