"""The timeline: clocks of several ranks read as one, and what the spans of a step add up to.

A span is a stretch of one rank's time, (kind, label, start_s, end_s). Spans of one rank nest or follow each other: an
all_reduce may lie inside a forward, and then that time is communication and no longer forward.
"""

import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist

ROUNDS = 16  # the best of them counts; more find a shorter one seldom

# Every kind of span, and the class that it counts for. Inside a call one communicates; for a message one waits.
CLASSES = {
    "data": "data", "forward": "forward", "backward": "backward", "input": "backward", "weight": "backward",
    "send": "communication",
    "all_reduce": "communication", "all_gather": "communication", "reduce_scatter": "communication",
    "optimizer": "optimizer", "receive": "waiting", "wait": "waiting",
}  # fmt: skip

Span = tuple[str, str, float, float]  # kind, label (the microbatch as text, or ""), start and end in seconds


class Clock(NamedTuple):
    """A clock of rank 0 for this rank: its own time plus `offset_s` is rank 0's, `uncertainty_s` off at most."""

    offset_s: float
    uncertainty_s: float


def align(group: dist.ProcessGroup, read: Callable[[], float] = time.perf_counter) -> Clock:
    """This rank's clock against rank 0's: a collective of ROUNDS small messages to and fro for each other rank.

    Rank 0 takes the time when it asks and when the answer is there; the answer says when the question came and when the
    answer left. Of all rounds the one with the least time on the way counts, since half of that is all that the offset
    can be wrong by (Cristian 1989; RFC 5905, section 8). Clocks drift apart, a few microseconds each second: align
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
    """Rank 0's side: ask, take the times, and at last tell `rank` how its clock stands."""
    answer = _times(group)
    best = Clock(0.0, float("inf"))
    for _ in range(ROUNDS):
        asked = read()
        dist.send(_times(group), group=group, group_dst=rank)
        dist.recv(answer, group=group, group_src=rank)
        came, left = answer.tolist()  # on CUDA this waits for the answer
        answered = read()
        half = ((answered - asked) - (left - came)) / 2  # of the time on the way
        if half < best.uncertainty_s:
            best = Clock(((asked - came) + (answered - left)) / 2, half)
    dist.send(answer.copy_(torch.tensor(best, dtype=torch.float64)), group=group, group_dst=rank)


def _answer(group: dist.ProcessGroup, read: Callable[[], float]) -> Clock:
    message = _times(group)
    for _ in range(ROUNDS):
        dist.recv(message, group=group, group_src=0)
        message.tolist()  # on CUDA the question is here only now
        message[0] = read()
        message[1] = read()
        dist.send(message, group=group, group_dst=0)
    dist.recv(message, group=group, group_src=0)
    return Clock(*message.tolist())


def _times(group: dist.ProcessGroup) -> torch.Tensor:
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    return torch.zeros(2, dtype=torch.float64, device=device)


def profile(spans: Iterable[Span]) -> dict[str, float]:
    """Seconds of one rank by class, all six of CLASSES; each moment counts for the innermost span alone."""
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
    """The share of the ranks' time in which they compute nothing, from the first forward to the last backward.

    1 - sum(forward + backward) / (ranks x time), a backward as a whole or in parts; None where nobody computes. All on
    one clock.
    """
    busy = [union(span for span in spans if CLASSES[span[0]] in ("forward", "backward")) for spans in spans_by_rank]
    starts, ends = [of[0][0] for of in busy if of], [of[-1][1] for of in busy if of]
    if not starts or max(ends) <= min(starts):
        return None
    return 1 - sum(map(length, busy)) / (len(busy) * (max(ends) - min(starts)))


def hidden_seconds(communication: Iterable[Span], compute: Iterable[Span]) -> float:
    """Seconds in which both go on at once: how much of the communication the computation hides."""
    one, other = union(communication), union(compute)
    return length(one) + length(other) - length(_merged([*one, *other]))


def union(spans: Iterable[Span]) -> list[tuple[float, float]]:
    """The moments that any of the spans covers, as (start, end) in order, apart from each other."""
    return _merged((start, end) for _, _, start, end in spans)


def length(intervals: Iterable[tuple[float, float]]) -> float:
    return sum(end - start for start, end in intervals)


def _merged(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    found: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((start, end))
    return found


# The Chrome trace of several ranks: one JSON object that Perfetto (ui.perfetto.dev) and chrome://tracing open.
#
# A process is a rank, a thread is one of its lanes. In a lane events nest or follow each other, as both viewers
# demand; what runs at the same time (two buckets on their way) is spread over lanes of the same name. Times are whole
# nanoseconds until they are written, in microseconds as the format has them: so nothing that nests is torn by a
# rounding. Format: "Trace Event Format", JSON Object Format, complete events (ph X) and metadata events (ph M).

LANES = ("phases", "compute", "communication", "waiting")  # from top to bottom
GAP_NS = 1_000_000  # between the steps of two variants, which are shown one after the other


class Event(NamedTuple):
    """What one rank did from `start_ns` to `end_ns` on rank 0's clock; `label` is the microbatch, or ""."""

    lane: str
    name: str
    start_ns: int
    end_ns: int
    label: str = ""


class Process(NamedTuple):
    """A rank as the trace names it."""

    host: str
    clock: Clock


def chrome_trace(run_id: str, ranks: Sequence[Process], steps: dict[str, list[list[Event]]]) -> Iterator[str]:
    """The file, piece by piece: `steps` holds by variant the events of each rank in its profiled step."""
    clocks = [
        {"rank": rank, "host": process.host, "clock_offset_us": _us(process.clock.offset_s),
         "clock_uncertainty_us": _us(process.clock.uncertainty_s)}
        for rank, process in enumerate(ranks)
    ]  # fmt: skip
    other = {"run": run_id, "clock": "rank 0's; a rank's own plus its offset is rank 0's", "ranks": clocks}
    yield f'{{"displayTimeUnit": "ms", "otherData": {json.dumps(other)}, "traceEvents": [\n'
    yield ",\n".join(json.dumps(event, separators=(",", ":")) for event in _events(ranks, steps))
    yield "\n]}\n"


def _events(ranks: Sequence[Process], steps: dict[str, list[list[Event]]]) -> Iterator[dict[str, Any]]:
    in_a_row = list(one_after_the_other(steps))
    tids = count(1)  # of all ranks: a viewer may take two threads of one number for one
    for rank, process in enumerate(ranks):
        name = f"rank {rank} on {process.host}"
        label = f"clock {_us(process.clock.offset_s)} ± {_us(process.clock.uncertainty_s)} us"
        about: dict[str, dict[str, Any]] = {
            "process_name": {"name": name},
            "process_labels": {"labels": label},
            "process_sort_index": {"sort_index": rank},
        }
        yield from (_metadata(kind, rank, 0, value) for kind, value in about.items())
        for tid, (lane, events) in zip(tids, _lanes(event for step in in_a_row for event in step[rank]), strict=False):
            yield _metadata("thread_name", rank, tid, {"name": lane})
            yield _metadata("thread_sort_index", rank, tid, {"sort_index": tid})
            yield from (_complete(event, rank, tid) for event in events)


def one_after_the_other(steps: dict[str, list[list[Event]]]) -> Iterator[list[list[Event]]]:
    """The steps in a row: the first begins at 0, the next GAP_NS after the last end; an event around each names it."""
    begin = 0
    for variant, of_ranks in steps.items():
        times = [time for events in of_ranks for event in events for time in (event.start_ns, event.end_ns)]
        shift = begin - min(times, default=0)
        moved = [
            [event._replace(start_ns=event.start_ns + shift, end_ns=event.end_ns + shift) for event in events]
            for events in of_ranks
        ]
        end = max(times, default=0) + shift
        yield [[Event("phases", variant, begin, end), *events] for events in moved]
        begin = end + GAP_NS


def _lanes(events: Iterable[Event]) -> Iterator[tuple[str, list[Event]]]:
    """The lanes of one rank in their order, each split until nothing in it overlaps without nesting."""
    of_lane: dict[str, list[Event]] = {lane: [] for lane in LANES}
    for event in events:
        of_lane[event.lane].append(event)
    for lane, found in of_lane.items():
        for number, nested in enumerate(in_rows(found), 1):
            yield lane if number == 1 else f"{lane} {number}", nested


def in_rows(events: Iterable[Event]) -> list[list[Event]]:
    """The events in as few rows as first fit finds: in each row, every two nest or do not touch."""
    rows: list[tuple[list[Event], list[int]]] = []  # of each row: its events, and the ends of those that are open
    for event in sorted(events, key=lambda event: (event.start_ns, -event.end_ns)):
        for row, ends in rows:
            while ends and ends[-1] <= event.start_ns:
                ends.pop()
            if not ends or event.end_ns <= ends[-1]:
                row.append(event)
                ends.append(event.end_ns)
                break
        else:
            rows.append(([event], [event.end_ns]))
    return [row for row, _ in rows]


def _complete(event: Event, rank: int, tid: int) -> dict[str, Any]:
    about = {"args": {"microbatch": event.label}} if event.label else {}
    times = {"ts": event.start_ns / 1000, "dur": (event.end_ns - event.start_ns) / 1000}
    return {"ph": "X", "name": event.name, "cat": event.lane, "pid": rank, "tid": tid, **times, **about}


def _metadata(name: str, rank: int, tid: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": rank, "tid": tid, "args": args}


def _us(seconds: float) -> float:
    return round(1e6 * seconds, 1)


class Lap:
    """Wall and CPU seconds of what runs inside the block, from `began_s` to `ended_s` of `time.perf_counter`.

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
