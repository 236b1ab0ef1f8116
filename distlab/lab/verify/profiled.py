"""The profiled pass (LAB_TRACE=1): one step of each variant under torch.profiler, of all ranks in one `trace.json`.

The profiler sees what no mark can: when gloo or NCCL really sent, and so how much of it the backward pass hid. It also
slows the step, so this pass is apart from the timed one, its cost is said, and without LAB_TRACE nothing here is
imported.

Three clocks meet: marks are in time.perf_counter, the profiler's events in Unix time, and ranks have clocks of their
own. Each rank takes its events to perf_counter (`unix_ahead_ns`) and from there to rank 0's (`align`, anew: clocks
drift apart).
"""

import time
from collections.abc import Iterable, Mapping
from statistics import median
from typing import Any, NamedTuple

import torch
from torch.autograd import DeviceType

from distlab.contract import Build, Strategy
from distlab.lab.lab import Lab
from distlab.lab.measure.timeline import Clock, Event, Process, Span, align, chrome_trace, hidden_seconds, length, union
from distlab.lab.report import records
from distlab.lab.report.reading import write_atomically
from distlab.lab.verify.counted import WARMUP_STEPS, train
from distlab.lab.workload.data import Batches
from distlab.techniques.collectives.phases import phase, recorded

MOST_EVENTS = 5000  # of one rank and variant, the longest: 8 ranks and 6 variants make a file of 25 MB
WAITING = ("receive", "wait")


class Profiled(NamedTuple):
    """One step under the profiler, on this rank: its seconds, its marks, and what the profiler saw."""

    step_s: float
    phases: list[Span]
    compute: list[Span]
    communication: list[Span]


def trace(lab: Lab, variants: Mapping[str, Build]) -> None:
    """Profile one step of every variant, write `trace.json` on rank 0, and record how much communication was hidden."""
    if not any(isinstance(record, records.Steps) and record.step_seconds for record in lab.journal.records):
        lab.say("no step was left to train, so none is profiled", "trace")
        return
    clock = align(lab.group)
    dtype = getattr(torch, lab.config.dtype)
    batches = lab.batches(dtype)
    steps: dict[str, list[list[Event]]] = {}
    costs: dict[str, float] = {}
    dropped = 0
    for name, build in variants.items():
        lab.at(0, f"trace of {name}")
        strategy = build(lab.model(dtype), lab.mesh, lab.config)
        train(lab, strategy, batches, range(WARMUP_STEPS))
        profiled = profile_step(lab, strategy, batches)
        del strategy
        lab.journal.write(overlap(name, profiled))
        found = events(profiled, clock)
        dropped += len(found[MOST_EVENTS:])
        everyone = lab.exchange.gather(f"trace of {name}", [profiled.step_s, timed_s(lab, name), found[:MOST_EVENTS]])
        if everyone is not None:
            steps[name] = [[Event(*event) for event in of_rank] for _, _, of_rank in everyone]
            costs[name] = max(step_s for step_s, _, _ in everyone) / max(timed for _, timed, _ in everyone)
        lab.work.advance()
    write_trace(lab, clock, steps, costs)
    if dropped:
        lab.say(f"trace      the {dropped} shortest of this rank's events are left out", all_ranks=True)


def profile_step(lab: Lab, strategy: Strategy, batches: Batches) -> Profiled:
    """One step of a warm strategy under torch.profiler; all ranks begin together."""
    from torch.profiler import ProfilerActivity, profile

    cuda = [ProfilerActivity.CUDA] if lab.device.type == "cuda" else []
    microbatches = lab.dealt(batches, WARMUP_STEPS)
    with profile(activities=[ProfilerActivity.CPU, *cuda], acc_events=True) as profiler, recorded(lab.device) as phases:
        ahead_ns = unix_ahead_ns()
        lab.exchange.barrier("profiled step")
        started = time.perf_counter()
        strategy.backward(microbatches)
        with phase("optimizer"):
            strategy.update()
        if cuda:
            torch.cuda.synchronize(lab.device)
        step_s = time.perf_counter() - started
    assert profiler.profiler is not None
    assert profiler.profiler.kineto_results is not None
    seen = profiler.profiler.kineto_results.events()
    marks = [(span.kind, span.label, span.start_s, span.end_s) for span in phases if span.start_s >= started]
    return Profiled(step_s, marks, *sorted_out(seen, ahead_ns, started, bool(cuda)))


def unix_ahead_ns() -> int:
    """How far Unix time is ahead of perf_counter, from the one of ten readings that was interrupted least."""
    readings = []
    for _ in range(10):
        before, now, after = time.perf_counter_ns(), time.time_ns(), time.perf_counter_ns()
        readings.append((after - before, now - (before + after) // 2))
    return min(readings)[1]


def sorted_out(seen: Iterable[Any], ahead_ns: int, started_s: float, cuda: bool) -> tuple[list[Span], list[Span]]:
    """Compute and communication among the profiler's events since `started_s`, in seconds of perf_counter.

    On the CPU compute is every aten operation that no other one called, and communication what gloo names. On CUDA both
    are what ran on the device, where NCCL's kernels bear its name.
    """
    compute: list[Span] = []
    communication: list[Span] = []
    until = 0  # the end of the operation that is running
    for event in sorted(seen, key=lambda event: (event.start_ns(), -event.duration_ns())):
        name, start, end = event.name(), event.start_ns() - ahead_ns, event.start_ns() - ahead_ns + event.duration_ns()
        span = (name, "", start / 1e9, end / 1e9)
        if span[2] < started_s or (event.device_type() == DeviceType.CUDA) is not cuda:
            continue
        if name.startswith(("gloo:", "nccl:")) or (cuda and "nccl" in name):
            communication.append(span)
        elif cuda or (name.startswith("aten::") and start >= until):
            compute.append(span)
            until = end
    return compute, communication


def overlap(variant: str, profiled: Profiled) -> records.Overlap:
    """How much of this rank's communication ran while it computed its backward pass.

    A posted receive is left out: it lies open from the moment it is posted, whether anything is sent or not.
    """
    sent = [span for span in profiled.communication if not span[0].endswith(("recv", "recvAnySource"))]
    passes = union(span for span in profiled.phases if span[0] == "backward")
    work = [span for span in profiled.compute if any(start <= span[2] < end for start, end in passes)]
    return records.Overlap(variant, length(union(sent)), hidden_seconds(sent, work))


def events(profiled: Profiled, clock: Clock) -> list[Event]:
    """What goes into the trace: marks, compute and communication on rank 0's clock, the longest first."""
    lanes = [("waiting" if span[0] in WAITING else "phases", span) for span in profiled.phases]
    lanes += [("compute", span) for span in profiled.compute]
    lanes += [("communication", span) for span in profiled.communication]
    found = [
        Event(lane, kind, round(1e9 * (start_s + clock.offset_s)), round(1e9 * (end_s + clock.offset_s)), label)
        for lane, (kind, label, start_s, end_s) in lanes
    ]
    return sorted(found, key=lambda event: event.start_ns - event.end_ns)


def timed_s(lab: Lab, variant: str) -> float:
    timed = [r for r in lab.journal.records if isinstance(r, records.Steps) and r.variant == variant]
    return median(timed[-1].step_seconds)


def write_trace(lab: Lab, clock: Clock, steps: dict[str, list[list[Event]]], costs: dict[str, float]) -> None:
    """Write `trace.json` on rank 0, and say where it is and what it cost."""
    start = lab.journal.records[0]
    assert isinstance(start, records.Start)
    ranks = lab.exchange.gather("clocks", [start.host, clock])
    if ranks is None or lab.journal.folder is None:
        return
    path = lab.journal.folder / "trace.json"
    processes = [Process(host, Clock(*clock)) for host, clock in ranks]
    write_atomically(path, chrome_trace(start.run_id, processes, steps))
    cost = ", ".join(f"{ratio:.2f} ({name})" for name, ratio in costs.items())
    lab.say(f"{path} · a profiled step against a timed one: {cost}", heading="trace", at="normal")
