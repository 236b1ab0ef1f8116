"""A known case for each meter, before anything is measured by it: a meter that is wrong would call all else right.

  memory    tensors of all classes, of sizes that tell them apart, at rest and at the peak; one that is saved twice
  seconds   a thread that computes for a while, and one that sleeps, beside what other clocks say of the same stretch
  spans     made-up marks, of which the seconds by class, the idle share and what is hidden are known
  ranks     made-up steps of three ranks: the median of each, the slowest of all, and the row that tells it

None depends on how fast the machine is: clocks are held against clocks around them.
"""

import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distlab.collectives.phases import Span
from distlab.lab import Lab
from distlab.measure.activations import SavedActivations
from distlab.measure.memory import MemoryLedger
from distlab.measure.timeline import Lap, bubble, hidden_seconds, profile
from distlab.report import records
from distlab.report.tables import measured
from distlab.report.timeline_data import slowest_rank
from distlab.report.units import milliseconds
from distlab.report.verdict import judge, slowest

CONTROL = "tests/rank/test_known_cases.py::test_a_meter_that_is_wrong_is_seen"
WEIGHTS, INPUTS, BUCKET, MASTERS, MOMENTS, MESSAGE = 512, 512, 896, 640, 768, 1152  # numbers, the first 3 of 2 bytes
WORKING = 16  # bytes of two numbers beside what has a name
CYCLE = 64  # numbers that only a collector frees
LENGTH_S = 0.002  # of the thread's own computing, and of its sleep


class Remembering(torch.optim.Optimizer):
    """An optimizer as far as memory goes: making one of torch's imports its compiler, a second."""

    def __init__(self, state: dict[nn.Parameter, dict[str, Tensor]]) -> None:
        self.state = state  # type: ignore[assignment]


def check_meters(lab: Lab) -> None:
    """Try them all, by all ranks; 10 ms."""
    lab.at(0, "the meters")
    faults = [
        *memory_faults(lab.device, lab.group),
        *seconds_faults(),
        *span_faults(),
        *rank_faults(),
    ]
    detail = faults[0] if faults else "memory, seconds, spans and ranks of known cases"
    lab.check("meters", len(faults), 0, detail=detail, control=CONTROL)


def memory_faults(device: torch.device, group: dist.ProcessGroup) -> Iterator[str]:
    """What the meters of memory make of a step that holds so much of each class."""
    with MemoryLedger(device) as memory:
        weight = nn.Parameter(torch.zeros(WEIGHTS, dtype=torch.bfloat16, device=device))
        master = nn.Parameter(torch.zeros(MASTERS, device=device))
        optimizer = Remembering({master: {"moment": torch.zeros(MOMENTS, device=device)}})
        inputs = torch.zeros(INPUTS, dtype=torch.bfloat16, device=device)
        bucket = torch.zeros(BUCKET, dtype=torch.bfloat16, device=device)
        message = torch.zeros(MESSAGE, device=device)
        with SavedActivations(memory.saves) as saved, memory.step():
            dist.all_reduce(message, group=group)
            (weight * inputs * inputs).sum().backward()
            weight.grad = bucket[:WEIGHTS]  # autograd's own goes
            message.untyped_storage().resize_(0)  # or the meter would wait for it to be let go
            cycle: list[object] = [torch.zeros(CYCLE, device=device)]
            cycle.append(cycle)  # gone at rest, and not when the step is over
            del cycle
    del weight, master, optimizer, inputs, bucket, message
    held = {"parameters": 2 * WEIGHTS, "gradients": 2 * BUCKET, "optimizer": 4 * (MASTERS + MOMENTS)}
    yield from unlike("bytes at rest", held | {"activations": 2 * INPUTS, "communication": 0}, memory.rest)
    yield from unlike("bytes saved for the backward pass", (2 * INPUTS, 0), (saved.peak_bytes, saved.live_bytes))
    with SavedActivations() as saved:
        for length in (INPUTS, INPUTS // 2):  # the most comes first
            (nn.Parameter(torch.zeros(length)) * torch.zeros(length)).sum().backward()
    yield from unlike("the most bytes saved", (4 * INPUTS, 0), (saved.peak_bytes, saved.live_bytes))
    # When the gradient comes, that of its product is there, too; the loss and its gradient are two numbers.
    working = memory.peak["activations"] - 2 * INPUTS - 2 * WEIGHTS
    peak = memory.peak | {"activations": working if not 0 <= working <= WORKING else 0}
    held |= {"gradients": 2 * (BUCKET + WEIGHTS), "activations": 0, "communication": 4 * MESSAGE}
    yield from unlike("bytes at the peak", held, peak)


def seconds_faults() -> Iterator[str]:
    """What a lap makes of a thread that computes, and of one that sleeps."""
    with Lap() as around, Lap() as computing:
        until = time.thread_time() + LENGTH_S
        while time.thread_time() < until:
            pass
    yield from out_of_bounds("computing", 0.9 * LENGTH_S, computing.cpu_s, around.cpu_s)
    yield from out_of_bounds("the time of computing", 0.9 * LENGTH_S, computing.wall_s, around.wall_s)
    outside, busy = time.perf_counter(), time.process_time()
    with Lap() as asleep:
        time.sleep(LENGTH_S)
    busy, outside = time.process_time() - busy, time.perf_counter() - outside
    yield from out_of_bounds("a sleep's computing", 0.0, asleep.cpu_s, busy)
    yield from out_of_bounds("a sleep", 0.9 * LENGTH_S, asleep.wall_s, outside)


def span_faults() -> Iterator[str]:
    """What the timeline makes of marks that lie inside each other, of ranks that take turns, and of two at once."""
    nested = [
        Span("forward", "0", 0, 4), Span("all_reduce", "", 1, 2), Span("input", "0", 4, 7), Span("weight", "0", 7, 10),
        Span("wait", "", 9, 10), Span("optimizer", "", 12, 13),
    ]  # fmt: skip
    seconds = {"data": 0, "forward": 3, "backward": 5, "communication": 1, "optimizer": 1, "waiting": 1}
    yield from unlike("seconds by class", seconds, profile(nested))
    turns = [[Span("forward", "0", 0, 1), Span("backward", "0", 3, 4)], [Span("forward", "0", 1, 2)]]
    yield from unlike("the idle share", 1 - 3 / 8, bubble(turns))
    sent, computed = [Span("send", "", 0, 2), Span("send", "", 1, 3)], [Span("forward", "0", 2, 5)]
    yield from unlike("hidden seconds", 1, hidden_seconds(sent, computed))


def rank_faults() -> Iterator[str]:
    """What the judge and the log make of three ranks' steps."""
    taken = [[1.0, 9.0, 2.0], [3.0, 3.0, 8.0], [1.0, 1.0, 1.0]]
    written: records.Ranks = {
        rank: [
            records.Start(rank, "known", "known", len(taken), "", {}, {}, {}),
            records.Steps("known", seconds, [second / 4 for second in seconds]),
            records.End(rank, 0.0, None, 0.0, 0.0),
        ]
        for rank, seconds in enumerate(taken)
    }
    run = judge(written)
    (variant,) = run["variants"]
    yield from unlike("the median step of each rank", [2.0, 3.0, 1.0], variant["step_seconds"])
    yield from unlike("the median CPU seconds of each rank", [0.5, 0.75, 0.25], variant["cpu_seconds"])
    yield from unlike("the slowest rank's step", 3.0, slowest(variant["step_seconds"]))
    yield from unlike("ms a step as told", milliseconds(3.0), measured(run, written).rows[0][1])
    work = [{"forward": 1.0, "waiting": 9.0}, {"forward": 2.0, "optimizer": 1.0}, {"backward": 2.0}]
    yield from unlike("the rank with most work of its own", (1, 3.0), slowest_rank([*work]))


def unlike(what: str, wanted: object, found: object) -> Iterator[str]:
    """A sentence where they differ."""
    if found != wanted:
        yield f"{what}: {found} where it is {wanted}"


def out_of_bounds(what: str, least: float, found: float, most: float) -> Iterator[str]:
    """A sentence where it is less or more."""
    if not least <= found <= most:
        yield f"{what}: {found:g} s where it is {least:g} to {most:g}"
