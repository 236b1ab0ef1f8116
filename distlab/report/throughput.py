"""Samples a second over a run, with each event on it: faults as they were made, and ranks that went, came or began
again.

It is drawn of a run with LAB_FAULTS, and of one whose ranks come and go; the records of others have no times of steps.
Variants that take turns are one curve; those that come one after another have a chart each. Ranks tell the same steps:
where the one that began first falls silent, another's times go on.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from distlab.report import charts
from distlab.report.charts import Drawing, Mark, marked
from distlab.report.records import Changed, Failed, Injected, Planned, Ranks, Run, Stood, select
from distlab.report.table import Column, Table
from distlab.report.verdict import first

MOST_STAIRS = 120  # of a curve
WORDS = {"lost": "rank lost", "asked": "rank joined", "restart": "began again"}
END = "end"
# The same in all charts of a page; faults have the rest in turn.
HUES = dict(zip((*WORDS.values(), END), (charts.PALETTE[place] for place in (1, 2, 3, 7)), strict=True))
OTHERS = tuple(charts.PALETTE[place] for place in (4, 6, 5))


class Event(NamedTuple):
    """What happened: when (Unix time), of which kind, and in words."""

    at: float
    kind: str
    told: str


class Course(NamedTuple):
    """Variants that were trained in the same time, when their steps stood, and when the next ones began."""

    variants: list[str]
    times: list[float]  # of all of them
    until: float = math.inf


class Pace(NamedTuple):
    """A course as the page shows it: its variants, its chart, and what happened."""

    name: str
    chart: Drawing
    events: Table


def pace(run: Run, records: Ranks) -> list[Pace]:
    """Every course; none where no rank wrote when its steps stood."""
    found = courses(records)
    samples = int(first(records).config["LAB_BATCH"]) if found else 0
    return [draw_throughput(each, samples, events(run, records, each)) for each in found]


def draw_throughput(course: Course, samples: int, happened: Sequence[Event]) -> Pace:
    """One chart, and its events as a table."""
    began = course.times[0]
    ended = max([course.times[-1], *(each.at for each in happened)])
    x, y = curve(course.times, samples, len(course.variants), ended)
    name = ", ".join(course.variants) if len(course.variants) < 3 else f"{len(course.variants)} variants in turn"
    figure = charts.line_chart({name: (x, y)}, "s", "samples/s", {name: charts.PALETTE[0]}, points=len(x))
    if happened:
        faults = dict.fromkeys(each.kind for each in happened if each.kind not in HUES)
        hues = HUES | {kind: OTHERS[place % len(OTHERS)] for place, kind in enumerate(faults)}
        marks = [Mark(each.at - began, each.kind, hues[each.kind]) for each in happened]
        figure = marked(figure, marks, ended - began, 1.08 * max(y))
    title = f"samples a second of {name}, with {len(happened)} events"
    rows = [[number, f"{each.at - began:.2f}", each.told] for number, each in enumerate(happened, 1)]
    columns = [Column("", "number"), Column("s", "number"), Column("what happened")]
    return Pace(name, charts.render_chart(figure, title, 220), Table(columns, rows))


def curve(times: Sequence[float], samples: int, every: int, ended: float) -> tuple[list[float], list[float]]:
    """A staircase, [seconds] and [samples a second], and from the last step to the end none. A stair is as wide
    as MOST_STAIRS allow, and a multiple of `every` steps, so that variants that take turns show no teeth."""
    least_s = (ended - times[0]) / MOST_STAIRS
    x, y, left = list[float](), list[float](), 0
    for place in range(every, len(times), every):
        took_s = times[place] - times[left]
        if took_s >= least_s:
            x += [times[left] - times[0], times[place] - times[0]]
            y += 2 * [samples * (place - left) / took_s]
            left = place
    if ended > times[left]:
        x += [times[left] - times[0], ended - times[0]]
        y += 2 * [samples * (len(times) - 1 - left) / (ended - times[left])]
    return x, y


# --- from the records ---


def courses(records: Ranks) -> list[Course]:
    """The variants in the order in which they began; those whose times overlap are one course."""
    of_rank: dict[str, dict[int, list[float]]] = {}
    for rank, stood in select(records, Stood):
        of_rank.setdefault(stood.variant, {}).setdefault(rank, []).extend(stood.at)
    found: list[Course] = []
    merged = {variant: covered(list(ranks.values())) for variant, ranks in of_rank.items()}
    for variant, times in sorted(merged.items(), key=lambda each: each[1]):
        if found and times[0] < found[-1].times[-1]:
            last = found.pop()
            found.append(Course([*last.variants, variant], sorted([*last.times, *times])))
        elif len(times) > 1:
            found.append(Course([variant], times))
    ends = [*(each.times[0] for each in found), math.inf][1:]
    return [each._replace(until=end) for each, end in zip(found, ends, strict=True)]


def covered(told: list[list[float]]) -> list[float]:
    """The times of the rank that began first, and behind its last one those of who went on: what came within half a
    step of that is the same step."""
    found: list[float] = []
    for times in sorted(told):
        after = found[-1] + (found[-1] - found[-2]) / 2 if len(found) > 1 else -math.inf
        found += [at for at in times if at > after]
    return found


def events(run: Run, records: Ranks, course: Course) -> list[Event]:
    """What happened while a course was trained, in its order."""
    plans = {plan.number: plan for _, plan in select(records, Planned)}
    found = [
        Event(each.at, plans[each.number].kind, plans[each.number].event)
        for _, each in select(records, Injected)
        if each.number in plans
    ]
    found += changes(records, course.variants)
    failed = {error["rank"] for error in run["errors"]}
    ends = [end for rank, end in select(records, Failed) if rank in failed]
    found += [Event(end.at, END, end.error) for end in ends[:1]]
    return sorted(each for each in found if course.times[0] <= each.at < course.until)


def changes(records: Ranks, variants: Sequence[str]) -> Iterator[Event]:
    """Ranks that went or came, each change once, as the first one noticed it."""
    seen: set[tuple[Any, ...]] = set()
    for _, each in sorted(select(records, Changed), key=lambda entry: entry[1].at):
        key = (each.variant, each.step, each.what, *each.members)
        if each.variant in variants and key not in seen:
            seen.add(key)
            members = " ".join(map(str, each.members))
            yield Event(each.at, WORDS[each.what], f"{WORDS[each.what]}: from step {each.step} on ranks {members}")
