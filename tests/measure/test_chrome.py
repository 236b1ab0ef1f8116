"""The trace as its viewers read it: one JSON object, complete events that nest in their lanes, names for all."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distlab.measure.timeline import GAP_NS, LANES, Clock, Event, Process, chrome_trace, in_rows, one_after_the_other

RANKS = [Process("alpha", Clock(0.0, 0.0)), Process("beta", Clock(-1.5e-6, 20e-6))]
STEPS = {
    "flat": [
        [Event("phases", "forward", 5_000_000, 7_000_000, "0"), Event("compute", "aten::mm", 5_100_000, 5_200_001)],
        [Event("phases", "forward", 5_500_000, 8_000_000, "0"), Event("waiting", "wait", 8_000_000, 9_000_000)],
    ],
    "ring": [
        [Event("communication", "gloo:send", 1000, 5000), Event("communication", "gloo:recv", 2000, 6000)],
        [],
    ],
}


def written(steps: dict[str, list[list[Event]]]) -> dict[str, Any]:
    trace: dict[str, Any] = json.loads("".join(chrome_trace("dp-1", RANKS, steps)))
    return trace


def faults(trace: dict[str, Any]) -> list[str]:
    """What Perfetto or chrome://tracing would not draw as it is meant."""
    events = trace["traceEvents"]
    named = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    processes = {event["pid"] for event in events if event["name"] == "process_name"}
    wrong = [f"{e} is neither complete nor metadata" for e in events if e["ph"] not in "XM"]
    open_until: dict[int, list[int]] = {}
    spans = [(e["tid"], round(1000 * e["ts"]), round(1000 * e["dur"]), e) for e in events if e["ph"] == "X"]
    for tid, start, duration, event in sorted(spans, key=lambda span: (span[0], span[1], -span[2])):
        ends = open_until.setdefault(tid, [])
        while ends and ends[-1] <= start:
            ends.pop()
        if duration < 0 or start < 0:
            wrong.append(f"{event} lasts or begins before nothing")
        if ends and start + duration > ends[-1]:
            wrong.append(f"{event} ends after what it lies in")
        if (event["pid"], tid) not in named or event["pid"] not in processes:
            wrong.append(f"{event} has no named lane")
        ends.append(start + duration)
    return wrong


def test_a_trace_has_lanes_names_and_clocks() -> None:
    trace = written(STEPS)
    assert faults(trace) == []
    names = {event["pid"]: event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"}
    assert names == {0: "rank 0 on alpha", 1: "rank 1 on beta"}
    lanes = [(e["pid"], e["args"]["name"]) for e in trace["traceEvents"] if e["name"] == "thread_name"]
    assert lanes == [
        (0, "phases"), (0, "compute"), (0, "communication"), (0, "communication 2"), (1, "phases"), (1, "waiting"),
    ]  # fmt: skip
    assert trace["otherData"]["ranks"][1] == {
        "rank": 1, "host": "beta", "clock_offset_us": -1.5, "clock_uncertainty_us": 20.0,
    }  # fmt: skip
    forward = next(event for event in trace["traceEvents"] if event["name"] == "forward")
    assert (forward["ts"], forward["dur"], forward["args"]) == (0.0, 2000.0, {"microbatch": "0"})


def test_steps_follow_each_other_whenever_they_ran() -> None:
    flat, ring = one_after_the_other(STEPS)
    assert [events[0] for events in flat] == [Event("phases", "flat", 0, 4_000_000)] * 2
    begin = 4_000_000 + GAP_NS
    assert ring[1] == [Event("phases", "ring", begin, begin + 5000)]
    assert ring[0][1].start_ns == begin and ring[0][2].start_ns == begin + 1000


@pytest.mark.parametrize(
    "broken",
    [
        {"ph": "X", "name": "a", "pid": 0, "tid": 1, "ts": 1000.0, "dur": 9000.0},  # leaves its parent
        {"ph": "X", "name": "a", "pid": 0, "tid": 1, "ts": 1.0, "dur": -1.0},
        {"ph": "X", "name": "a", "pid": 0, "tid": 99, "ts": 1.0, "dur": 1.0},
        {"ph": "B", "name": "a", "pid": 0, "tid": 1, "ts": 1.0},
    ],
)
def test_what_a_viewer_cannot_draw_is_seen(broken: dict[str, Any]) -> None:
    trace = written(STEPS)
    trace["traceEvents"].append(broken)
    assert len(faults(trace)) == 1


times = st.integers(0, 40)
drawn_events = st.lists(
    st.builds(
        lambda lane, start, length: Event(lane, "op", start, start + length), st.sampled_from(LANES), times, times
    ),
    max_size=30,
)


@given(drawn_events)
def test_any_events_fall_into_lanes_that_nest(events: list[Event]) -> None:
    trace = written({"any": [events, events]})
    assert faults(trace) == []
    assert sum(event["ph"] == "X" for event in trace["traceEvents"]) == 2 * (len(events) + 1)


def test_rows_are_as_few_as_first_fit_finds() -> None:
    nested = [Event("compute", "a", 0, 10), Event("compute", "b", 2, 4), Event("compute", "c", 4, 10)]
    assert in_rows([*nested, Event("compute", "d", 9, 12)]) == [nested, [Event("compute", "d", 9, 12)]]
