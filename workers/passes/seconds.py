"""What the seconds of the timed steps are held to: identities that a loaded machine changes nothing of.

number       the first two steps are left out where there are more, and no other one
a step       is no longer, and takes no more of the processor, than a second watch around the same step saw; and it is
             no shorter than what is marked in it
its marks    lie in it one and all, but the fetching of data, which is over before it begins
by class     the seconds of a step are those of its marks, each moment once
the profile  a median: half of the steps take as long in a class or longer, and half as long or shorter
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from workers.lab import Lab
from workers.measure.lap import Lap
from workers.measure.timeline import length, profile, union
from workers.parallel.phases import Span
from workers.report import records

CONTROL = "tests/workers/passes/test_seconds.py::test_seconds_that_are_wrong_fail"
LEFT_OUT = 2  # steps, whatever the pass takes for its warm-up
ROUNDING_S = 1e-9  # of sums and differences of seconds since the machine's start


class Timed(NamedTuple):
    """The timed steps of one variant on this rank."""

    laps: Sequence[Lap]  # a step each
    around: Sequence[Lap]  # of a second watch
    marked: Sequence[tuple[int, list[Span]]]  # (number in `laps`, marks) of the last ones
    steps: records.Steps
    profile: Mapping[str, float]


def check_seconds(lab: Lab, timed: Mapping[str, Timed]) -> None:
    """One check of all variants; the detail tells of the first thing that is wrong."""
    faults = [f"{name}: {fault}" for name, each in timed.items() for fault in wrong(each)]
    detail = faults[0] if faults else f"{sum(len(each.steps.step_seconds) for each in timed.values())} steps"
    lab.check("timed seconds", len(faults), 0, detail=detail, control=CONTROL)


def wrong(timed: Timed) -> Iterator[str]:
    """A sentence for each identity that is broken."""
    left_out = LEFT_OUT if len(timed.around) > LEFT_OUT else 0
    around = timed.around[left_out:]
    kept = [len(timed.steps.step_seconds), len(timed.steps.cpu_seconds)]
    if kept != [len(around)] * 2:
        yield f"{kept[0]} and {kept[1]} seconds of {len(timed.around)} steps, of which {left_out} are left out"
        return
    for lap, wall_s, cpu_s in zip(around, timed.steps.step_seconds, timed.steps.cpu_seconds, strict=True):
        if not (0 < wall_s <= lap.wall_s and 0 <= cpu_s <= lap.cpu_s):
            yield f"a step of {wall_s:g} s and {cpu_s:g} CPU s, in {lap.wall_s:g} and {lap.cpu_s:g}"
    for number, spans in timed.marked:
        yield from misplaced(spans, timed.laps[number])
        marked_s = length(union([span for span in spans if span.kind != "data"]))
        if number >= left_out and marked_s > timed.steps.step_seconds[number - left_out] + ROUNDING_S:
            yield f"a step of {timed.steps.step_seconds[number - left_out]:g} s in which {marked_s:g} s are marked"
    yield from unlike(timed.profile, [profile(spans) for _, spans in timed.marked])


def misplaced(spans: Sequence[Span], lap: Lap) -> Iterator[str]:
    """What is wrong with the marks of a step."""
    fetched = max((span.end_s for span in spans if span.kind == "data"), default=None)
    if fetched is None or fetched > lap.began_s:
        yield "data is fetched while the step is timed, or unmarked"
    if any(span.start_s < lap.began_s or span.end_s > lap.ended_s for span in spans if span.kind != "data"):
        yield f"marks that are not in their step of {lap.wall_s:g} s"
    off = abs(sum(profile(spans).values()) - length(union(spans)))
    if off > ROUNDING_S * len(spans):
        yield f"classes that add up to {off:g} s more or less than their marks"


def unlike(said: Mapping[str, float], steps: Sequence[Mapping[str, float]]) -> Iterator[str]:
    """A sentence for each class whose seconds are no median of the steps'."""
    for kind, seconds in said.items() if steps else ():
        below, above = (sum(sign * each[kind] <= sign * seconds for each in steps) for sign in (1, -1))
        if 2 * min(below, above) < len(steps):
            yield f"{seconds:g} s of {kind} are no median of {len(steps)} steps"
