"""What the losses of a run did, in words and pictures: who was in when, what each change cost, and when steps stood, of
which the report draws samples a second."""

from collections.abc import Iterator, Sequence
from typing import Any

from distlab.elastic.shards import keeper
from distlab.lab import Lab

from .checks import RULE, members_at
from .recovery import Course, Event

PLACEMENT = "members lie in pairs and keep each other's copy, of an odd number the last three do in a ring"
AGREED, NEXT = "agreed after (ms)", "next step after (ms)"
COLUMNS = [
    "", "what", "step", "in before", "in after", "steps redone", "state from", AGREED, NEXT, "next step at (Unix s)",
]  # fmt: skip
CONTROL = "tests/experiments/test_elastic.py::test_times_that_are_not_from_the_begin_of_a_change_fail"
ROUNDED_S = 1e-4  # to tenths of a millisecond in a row


def show(lab: Lab, courses: list[Course]) -> None:
    """Each variant as its first member saw it; all who are left call it together."""
    for course in courses:
        write_display(lab, course)
        check_times(lab, course)
    mine = [variant_summary(lab.rank, course) for course in courses]
    everyone = lab.exchange.gather("elastic", mine)
    if everyone is None:
        return
    lab.say(RULE, "rule")
    rows: list[list[Any]] = []
    for number, course in enumerate(courses):
        found = [of_rank[number] for of_rank in everyone if of_rank is not None and of_rank[number] is not None]
        for seen in found:
            rows += [[course.policy.name, *row] for row in seen["rows"]]
            record = ", ".join(f"from step {first}: {' '.join(map(str, ranks))}" for first, ranks in seen["record"])
            lab.say(f"{course.policy.name}: {record}", "members")
            if course.policy.copies:
                lab.say(f"{course.policy.name}: {PLACEMENT}; {placed(seen['record'])}", "copies")
    if rows:
        lab.table("What each change of members cost, as the first member saw it", COLUMNS, rows)


def write_display(lab: Lab, course: Course) -> None:
    """When this rank's steps stood, and who was in from when on, for the report."""
    name = course.policy.name
    lab.stood(name, [at for at, _ in course.commits])
    for event in course.events:
        what = "asked" if event.why == "asked" else "restart" if event.restored else "lost"
        lab.changed(name, event.applied, event.began_at, what, event.after)


def check_times(lab: Lab, course: Course) -> None:
    """What a row says of a change is from its begin on: agreed before the next step stood, which is the first one after
    that, and both moments in their order."""
    faults = [fault for event in course.events for fault in wrong(event, [at for at, _ in course.commits])]
    if course.events:
        detail = faults[0] if faults else f"{len(course.events)} changes on this rank"
        lab.check("times of changes", len(faults), 0, course.policy.name, detail, control=CONTROL)


def wrong(event: Event, stood_at: Sequence[float]) -> Iterator[str]:
    """A sentence for each thing that a change's times cannot be, of steps that stood then."""
    told = dict(zip(COLUMNS, ["", *event_row(event)], strict=True))
    began_at, agreed_s, next_s = event.began_at, told[AGREED] / 1000, told[NEXT] / 1000
    if not began_at <= event.met_at <= event.agreed_at:
        yield f"it began at {began_at}, all met at {event.met_at} and agreed at {event.agreed_at}"
    if abs(began_at + agreed_s - event.agreed_at) > ROUNDED_S:
        yield f"agreed {agreed_s:g} s after it began, where it is {event.agreed_at - began_at:g}"
    next_at = next((at for at in stood_at if at >= event.agreed_at), None)
    if event.next_step_at and (next_at != event.next_step_at or abs(began_at + next_s - next_at) > ROUNDED_S):
        yield f"the next step {next_s:g} s after it began, where it is {(next_at or 0) - began_at:g}"


def placed(record: list[list[Any]]) -> str:
    """Which rank held whose copy, from which step on."""
    found = []
    for first, ranks in record:
        keepers = [(rank, keeper(place, len(ranks))) for place, rank in enumerate(ranks)]
        pairs = ", ".join(f"{rank}'s with {ranks[place]}" for rank, place in keepers if place is not None)
        found.append(f"from step {first}: {pairs or 'none'}")
    return "; ".join(found)


def variant_summary(rank: int, course: Course) -> dict[str, Any] | None:
    """What the first member at the end tells of its variant; None from all others."""
    if not course.finished or rank != members_at(course.record, course.training.steps)[0]:
        return None
    return {
        "rows": [event_row(event) for event in course.events],
        "record": course.record,
    }


def event_row(event: Event) -> list[Any]:
    """An event as a row of the table."""
    agreed, after = (1000 * (at - event.began_at) for at in (event.agreed_at, event.next_step_at or event.agreed_at))
    redone = max(0, event.applied_before - event.applied)
    members = [" ".join(map(str, ranks)) for ranks in (event.before, event.after)]
    source = "checkpoint" if event.restored else "memory"
    cells = [event.why.partition(":")[0], event.applied, *members, redone, source, round(agreed, 1), round(after, 1)]
    return [*cells, round(event.next_step_at, 3)]
