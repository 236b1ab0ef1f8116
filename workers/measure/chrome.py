"""The Chrome trace of several ranks: one JSON object that Perfetto (ui.perfetto.dev) and chrome://tracing open.

A process is a rank, a thread is one of its lanes. In a lane events nest or follow each other, as both viewers demand;
what runs at the same time (two buckets on their way) is spread over lanes of the same name. Times are whole nanoseconds
until they are written, in microseconds as the format has them: so nothing that nests is torn by a rounding.
Format: "Trace Event Format", JSON Object Format, complete events (ph X) and metadata events (ph M).
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from typing import Any, NamedTuple

from workers.measure.timeline import Clock

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
        for number, nested in enumerate(apart(found), 1):
            yield lane if number == 1 else f"{lane} {number}", nested


def apart(events: Iterable[Event]) -> list[list[Event]]:
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
