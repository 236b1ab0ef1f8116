"""The timeline: align the ranks' clocks, and sum up the spans of a step.

A span is a stretch of one rank's time, (kind, label, start_s, end_s). Spans of one rank nest or follow each other: an
all_reduce may lie inside a forward, and then that time is communication and no longer forward.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist

ROUNDS = 16  # the shortest counts; more rounds rarely find a shorter one

# Every kind of span, and its class. A call is communication; a wait for a message is waiting.
CLASSES = {
    "data": "data", "forward": "forward", "backward": "backward", "input": "backward", "weight": "backward",
    "send": "communication",
    "all_reduce": "communication", "all_gather": "communication", "reduce_scatter": "communication",
    "optimizer": "optimizer", "receive": "waiting", "wait": "waiting",
}  # fmt: skip

Span = tuple[str, str, float, float]  # kind, label (the microbatch as text, or ""), start and end in seconds


class Clock(NamedTuple):
    """Rank 0's clock on this rank: own time plus `offset_s` is rank 0's, within `uncertainty_s`."""

    offset_s: float
    uncertainty_s: float


def align(group: dist.ProcessGroup, read: Callable[[], float] = time.perf_counter) -> Clock:
    """Compare this rank's clock with rank 0's: a collective with ROUNDS small round trips per rank.

    Rank 0 takes the time when it asks and when the answer arrives; the answer has the times when the question arrived
    and the answer left. The round with the least time on the way counts, since the offset's error is at most half of
    that (Cristian 1989; RFC 5905, section 8). Clocks drift apart, a few microseconds each second: align
    anew where it matters. Bounded by the group's own timeout.
    """
    clock = Clock(0.0, 0.0)
    for rank in range(1, group.size()):
        if group.rank() == 0:
            _ask(group, rank, read)
        elif group.rank() == rank:
            clock = _answer(group, read)
    return clock


def _ask(group: dist.ProcessGroup, rank: int, read: Callable[[], float]) -> None:
    """On rank 0: ask, take the times, and send `rank` its clock's offset."""
    answer = _times(group)
    best = Clock(0.0, float("inf"))
    for _ in range(ROUNDS):
        sent_at = read()
        dist.send(_times(group), group=group, group_dst=rank)
        dist.recv(answer, group=group, group_src=rank)
        question_at, answer_at = answer.tolist()  # on CUDA this waits for the answer
        received_at = read()
        half = ((received_at - sent_at) - (answer_at - question_at)) / 2  # of the time on the way
        if half < best.uncertainty_s:
            best = Clock(((sent_at - question_at) + (received_at - answer_at)) / 2, half)
    dist.send(answer.copy_(torch.tensor(best, dtype=torch.float64)), group=group, group_dst=rank)


def _answer(group: dist.ProcessGroup, read: Callable[[], float]) -> Clock:
    message = _times(group)
    for _ in range(ROUNDS):
        dist.recv(message, group=group, group_src=0)
        message.tolist()  # on CUDA this waits for the question
        message[0] = read()
        message[1] = read()
        dist.send(message, group=group, group_dst=0)
    dist.recv(message, group=group, group_src=0)
    return Clock(*message.tolist())


def _times(group: dist.ProcessGroup) -> torch.Tensor:
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    return torch.zeros(2, dtype=torch.float64, device=device)


def profile(spans: Iterable[Span]) -> dict[str, float]:
    """Return one rank's seconds by class, all six of CLASSES; only the innermost span counts."""
    seconds = dict.fromkeys(CLASSES.values(), 0.0)
    around: list[Span] = []  # the spans that are open, the innermost last
    for span in sorted(spans, key=lambda span: (span[2], -span[3])):
        kind, _, start, end = span
        while around and around[-1][3] <= start:
            around.pop()
        if around:
            seconds[CLASSES[around[-1][0]]] -= min(end, around[-1][3]) - start
        seconds[CLASSES[kind]] += end - start
        around.append(span)
    return seconds


def bubble(spans_by_rank: Sequence[Iterable[Span]]) -> float | None:
    """Return the share of the ranks' time without compute, from the first forward to the last backward.

    1 - sum(forward + backward) / (ranks x time), a backward as a whole or in parts; None if no rank computes. All
    times are on one clock.
    """
    busy = [union(span for span in spans if CLASSES[span[0]] in ("forward", "backward")) for spans in spans_by_rank]
    starts, ends = [of[0][0] for of in busy if of], [of[-1][1] for of in busy if of]
    if not starts or max(ends) <= min(starts):
        return None
    return 1 - sum(map(length, busy)) / (len(busy) * (max(ends) - min(starts)))


def union(spans: Iterable[Span]) -> list[tuple[float, float]]:
    """Return the union of the spans, as disjoint (start, end) in order."""
    found: list[tuple[float, float]] = []
    for start, end in sorted((start, end) for _, _, start, end in spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((start, end))
    return found


def length(intervals: Iterable[tuple[float, float]]) -> float:
    return sum(end - start for start, end in intervals)


class Lap:
    """Wall and CPU seconds of the block, from `began_s` to `ended_s` of `time.perf_counter`.

    CPU seconds are those of all threads of this process. They are read inside of the wall's, so that however a rank is
    interrupted they are no more than cores x `wall_s`.
    """

    __slots__ = ("_busy_s", "began_s", "cpu_s", "ended_s")

    def __enter__(self) -> Self:
        self.began_s = time.perf_counter()
        self._busy_s = time.process_time()
        return self

    def __exit__(self, *error: Any) -> None:
        self.cpu_s = time.process_time() - self._busy_s
        self.ended_s = time.perf_counter()

    @property
    def wall_s(self) -> float:
        return self.ended_s - self.began_s
