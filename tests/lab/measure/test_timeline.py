"""The arithmetic of spans by hand, and the clocks of real ranks on one machine, where the truth is known."""

import json
import time
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from distlab.lab.measure.timeline import (
    GAP_NS,
    LANES,
    Clock,
    Event,
    Lap,
    Process,
    Span,
    align,
    bubble,
    chrome_trace,
    hidden_seconds,
    in_rows,
    length,
    one_after_the_other,
    profile,
    union,
)
from distlab.tools.testing.warm_ranks import Ranks

pytestmark = pytest.mark.timeout(60)
SHIFT_S = 0.25


def shifted_by_rank(group: dist.ProcessGroup, shift_s: float) -> tuple[float, float]:
    """Rank r's clock is r * shift_s fast."""
    offset_s, uncertainty_s = align(group, lambda: time.perf_counter() + group.rank() * shift_s)
    return offset_s, uncertainty_s


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_clocks_of_one_machine_agree(ranks: Ranks, world_size: int) -> None:
    first, *others = ranks(world_size, shifted_by_rank, 0.0)
    assert first == (0.0, 0.0)
    for offset_s, uncertainty_s in others:
        assert 0 < uncertainty_s < 0.02
        assert abs(offset_s) <= uncertainty_s


def test_a_clock_that_is_fast_is_found(ranks: Ranks) -> None:
    for rank, (offset_s, uncertainty_s) in enumerate(ranks(3, shifted_by_rank, SHIFT_S)):
        assert offset_s == pytest.approx(-rank * SHIFT_S, abs=uncertainty_s)
        assert uncertainty_s < SHIFT_S / 10  # or the line above would say nothing


def test_each_moment_counts_for_the_innermost_span() -> None:
    spans: list[Span] = [
        ("all_reduce", "", 2.0, 3.0),  # in the order of their ends
        ("wait", "", 4.5, 4.75),
        ("send", "", 4.0, 5.0),
        ("forward", "0", 1.0, 6.0),
        ("backward", "0", 6.0, 8.0),
        ("receive", "1", 9.0, 9.5),
        ("optimizer", "", 10.0, 10.5),
        ("input", "0", 11.0, 11.25),  # a backward pass in two parts
        ("weight", "0", 11.5, 12.0),
    ]
    assert profile(spans) == {
        "data": 0.0, "forward": 3.0, "backward": 2.75, "communication": 1.75, "optimizer": 0.5, "waiting": 0.75,
    }  # fmt: skip
    assert sum(profile(spans).values()) == pytest.approx(length(union(spans)))


def test_a_lap_knows_computing_from_a_sleep_by_other_clocks_around_it() -> None:
    length_s = 0.002  # of the thread's own computing, and of its sleep
    with Lap() as around, Lap() as computing:
        until = time.thread_time() + length_s
        while time.thread_time() < until:
            pass
    assert 0.9 * length_s <= computing.cpu_s <= around.cpu_s
    assert 0.9 * length_s <= computing.wall_s <= around.wall_s
    outside, busy = time.perf_counter(), time.process_time()
    with Lap() as asleep:
        time.sleep(length_s)
    busy, outside = time.process_time() - busy, time.perf_counter() - outside
    assert 0 <= asleep.cpu_s <= busy
    assert 0.9 * length_s <= asleep.wall_s <= outside


def test_a_step_of_nothing_has_every_class() -> None:
    assert set(profile([]).values()) == {0.0}


def test_the_bubble_of_two_stages_and_two_microbatches() -> None:
    """Forward 1 s, backward 2 s: 6 s of work a rank in 9 s, (p-1)/(m+p-1) = 1/3."""
    first: list[Span] = [
        ("forward", "0", 0, 1),
        ("forward", "1", 1, 2),
        ("backward", "0", 4, 6),
        ("backward", "1", 7, 9),
    ]
    last: list[Span] = [
        ("forward", "0", 1, 2),
        ("backward", "0", 2, 4),
        ("forward", "1", 4, 5),
        ("backward", "1", 5, 7),
    ]
    waits: list[Span] = [("receive", "0", 2, 4), ("optimizer", "", 9, 20)]  # neither computes nor stretches the time
    assert bubble([first, last]) == pytest.approx(1 / 3)
    assert bubble([[*first, *waits], last]) == pytest.approx(1 / 3)
    assert bubble([first, last, []]) == pytest.approx(1 - 12 / 27)  # a rank that does nothing is all bubble


def test_no_bubble_where_nobody_computes() -> None:
    assert bubble([]) is None
    assert bubble([[], [("all_reduce", "", 0.0, 1.0)]]) is None
    assert bubble([[("forward", "0", 0.0, 1.0)]]) == 0.0


def test_only_what_runs_at_once_is_hidden() -> None:
    sent: list[Span] = [("all_reduce", "", 1.0, 3.0), ("all_reduce", "", 2.0, 4.0), ("all_reduce", "", 8.0, 9.0)]
    work: list[Span] = [("backward", "", 0.0, 1.5), ("backward", "", 3.5, 8.25)]
    assert hidden_seconds(sent, work) == pytest.approx(0.5 + 0.5 + 0.25)
    assert hidden_seconds(sent, [("backward", "", 4.0, 8.0)]) == 0.0
    assert hidden_seconds(sent, []) == hidden_seconds([], work) == 0.0


def test_a_union_joins_what_touches() -> None:
    assert union([("send", "", 2.0, 3.0), ("send", "", 0.0, 1.0), ("send", "", 1.0, 2.0), ("send", "", 5.0, 6.0)]) == [
        (0.0, 3.0),
        (5.0, 6.0),
    ]


# The trace as its viewers read it: one JSON object, complete events that nest in their lanes, names for all.

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
