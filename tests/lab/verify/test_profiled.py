"""The profiled pass on real ranks, and how its clocks and spans are made from what the profiler reports."""

import json
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.autograd import DeviceType

from distlab.lab.measure.timeline import Clock, Span
from distlab.lab.report.records import Clock as ClockRecord
from distlab.lab.report.records import Overlap, Said, select
from distlab.lab.verify.profiled import MOST_EVENTS, Profiled, events, overlap, sorted_out, unix_ahead_ns
from distlab.tools.testing.warm_ranks import Ranks
from tests.lab.measure.test_timeline import faults
from tests.labs import run_experiment

pytestmark = pytest.mark.timeout(120)


class Seen(NamedTuple):
    """An event as the profiler reports it."""

    called: str
    start: int
    duration: int
    device: DeviceType = DeviceType.CPU

    def name(self) -> str:
        return self.called

    def start_ns(self) -> int:
        return self.start

    def duration_ns(self) -> int:
        return self.duration

    def device_type(self) -> DeviceType:
        return self.device


SEEN = [
    Seen("aten::add", 990, 5),  # before the step
    Seen("aten::linear", 1000, 100),
    Seen("aten::addmm", 1010, 50),  # called by the one above
    Seen("c10d::allreduce_", 1100, 10),
    Seen("gloo:all_reduce", 1105, 200),
    Seen("aten::mm", 1200, 20),
    Seen("autograd::engine::evaluate_function: MmBackward0", 1190, 50),
    Seen("gemm", 1300, 40, DeviceType.CUDA),
    Seen("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 1320, 80, DeviceType.CUDA),
]


def names(spans: list[Span]) -> list[str]:
    return [span[0] for span in spans]


def test_compute_and_communication_are_told_apart() -> None:
    compute, communication = sorted_out(SEEN, 0, 1e-6, cuda=False)
    assert (names(compute), names(communication)) == (["aten::linear", "aten::mm"], ["gloo:all_reduce"])
    assert communication[0][2:] == pytest.approx((1105e-9, 1305e-9))
    compute, communication = sorted_out(SEEN, 0, 1e-6, cuda=True)
    assert (names(compute), names(communication)) == (["gemm"], ["ncclDevKernel_AllReduce_Sum_f32_RING_LL"])


def test_events_are_taken_from_unix_time() -> None:
    (first, *_), _ = sorted_out(SEEN, 400, 600e-9, cuda=False)
    assert first[2] == pytest.approx(600e-9)


def test_unix_time_is_read_to_a_few_microseconds() -> None:
    ahead_ns = unix_ahead_ns()
    # Between two readings, however long a busy machine stops us there.
    before_ns, now_ns, after_ns = time.time_ns(), time.perf_counter_ns() + ahead_ns, time.time_ns()
    assert before_ns - 50_000 <= now_ns <= after_ns + 50_000


def test_the_profiler_and_the_marks_agree_on_the_time() -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profiler:
        torch.ones(1000).sum()
        ahead_ns = unix_ahead_ns()
        started = time.perf_counter()
        torch.ones(1000).sum()
        ended = time.perf_counter()
    assert profiler.profiler is not None and profiler.profiler.kineto_results is not None
    compute, _ = sorted_out(profiler.profiler.kineto_results.events(), ahead_ns, started, cuda=False)
    assert names(compute) == ["aten::ones", "aten::sum"]
    assert started <= compute[0][2] <= compute[1][3] <= ended + 2e-3


def profiled(communication: list[Span]) -> Profiled:
    """A step with a backward pass from 2 to 6, in which the rank computes from 2 to 3 and from 5 to 6."""
    compute: list[Span] = [("aten::mm", "", 0.0, 1.0), ("aten::mm", "", 2.0, 3.0), ("aten::mm", "", 5.0, 6.0)]
    return Profiled(7.0, [("forward", "0", 0.0, 2.0), ("backward", "0", 2.0, 6.0)], compute, communication)


def test_hidden_is_what_runs_while_the_backward_pass_computes() -> None:
    seen = overlap("flat", profiled([("gloo:all_reduce", "", 2.5, 5.5), ("gloo:all_reduce", "", 5.0, 7.0)]))
    assert seen == Overlap("flat", 4.5, 1.5)
    assert overlap("flat", profiled([("gloo:all_reduce", "", 0.0, 1.0)])).hidden_s == 0.0  # the forward pass
    assert overlap("ring", profiled([("gloo:recv", "", 0.0, 7.0)])).communication_s == 0.0  # posted, not sent


def test_events_stand_on_rank_0s_clock_in_their_lanes() -> None:
    step = profiled([("gloo:send", "", 2.0, 3.0)])
    step.phases.append(("receive", "1", 6.0, 6.5))
    found = {(event.lane, event.name): event for event in events(step, Clock(10.0, 0.0))}
    assert found["communication", "gloo:send"][2:] == (12_000_000_000, 13_000_000_000, "")
    assert found["waiting", "receive"][2:] == (16_000_000_000, 16_500_000_000, "1")
    assert {lane for lane, name in found if name == "aten::mm"} == {"compute"}


def test_the_longest_events_come_first() -> None:
    """Of too many, the shortest are left out."""
    step = profiled([("gloo:send", "", 0.0, 1e-9 * k) for k in range(MOST_EVENTS + 10)])
    found = events(step, Clock(0.0, 0.0))
    lengths = [event.end_ns - event.start_ns for event in found]
    assert lengths == sorted(lengths, reverse=True)
    assert {"forward", "backward"} <= {event.name for event in found[:MOST_EVENTS]}


def traced(ranks: Ranks, folder: Path, trace: str) -> tuple[dict[int, Any], Path]:
    settings = {"RUN_MODE": "dp", "LAB_TRACE": trace, "LAB_PROOF": "0", "LAB_BUCKET_MIB": "0.01"}
    _, records = run_experiment(ranks, 2, folder, LAB_VARIANT="per_parameter,bucketed", **settings)
    return records, folder / "trace.json"


def test_a_traced_run_leaves_one_trace_of_all_ranks(ranks: Ranks, tmp_path: Path) -> None:
    records, path = traced(ranks, tmp_path, "1")
    trace = json.loads(path.read_text())
    assert faults(trace) == []
    seen = {(event["pid"], event["cat"], event["name"]) for event in trace["traceEvents"] if event["ph"] == "X"}
    for rank in (0, 1):
        assert {
            (rank, "phases", name) for name in ("per_parameter", "bucketed", "forward", "backward", "optimizer")
        } <= seen
        assert {(rank, "communication", "gloo:all_reduce"), (rank, "compute", "aten::linear")} <= seen
    hidden = [(rank, entry.variant) for rank, entry in select(records, Overlap)]
    assert hidden == [(0, "per_parameter"), (0, "bucketed"), (1, "per_parameter"), (1, "bucketed")]
    assert all(0 <= entry.hidden_s <= entry.communication_s for _, entry in select(records, Overlap))
    assert all(entry.hidden_s == 0 for _, entry in select(records, Overlap) if entry.variant == "per_parameter")
    (said,) = [entry.text for _, entry in select(records, Said) if entry.heading == "trace"]
    assert said.startswith(f"{path} · a profiled step against a timed one: ") and said.endswith("(bucketed)")
    assert len(list(select(records, ClockRecord))) == 2
    assert out_of_order(trace, rank=1) == []


def out_of_order(trace: dict[str, Any], rank: int) -> list[dict[str, Any]]:
    """What stands on the wrong side of the per_parameter backward pass: its marks, gloo's time and the profiler's are one
    clock."""
    found = [event for event in trace["traceEvents"] if event["ph"] == "X" and event["pid"] == rank]
    step = next(event for event in found if event["name"] == "per_parameter")
    inside = [event for event in found if step["ts"] <= event["ts"] <= step["ts"] + step["dur"]]
    end = max(event["ts"] + event["dur"] for event in inside if event["name"] == "backward")
    return [
        event
        for event in inside
        if (event["name"] == "gloo:all_reduce" and event["ts"] < end)
        or (event["name"] == "aten::linear" and event["ts"] > end)
    ]


def test_without_lab_trace_there_is_none(ranks: Ranks, tmp_path: Path) -> None:
    records, path = traced(ranks, tmp_path, "0")
    assert not path.exists()
    assert list(select(records, Overlap)) == []
