"""What the losses of a run did, in words and pictures: who was in when, what each change cost, and samples a second."""

from typing import Any

from experiments.elastic.course import Course, Event
from experiments.elastic.holding import RULE, members_at
from workers.lab import Lab

WINDOWS = 60  # of the curve of samples a second
COLUMNS = [
    "", "what", "step", "in before", "in after", "steps redone", "agreed after (ms)", "next step after (ms)",
    "next step at (Unix s)",
]  # fmt: skip


def show(lab: Lab, courses: list[Course]) -> None:
    """Each variant as its first member saw it; all who are left call it together."""
    mine = [told(lab.rank, course) for course in courses]
    everyone = lab.exchange.gather("elastic", mine)
    if everyone is None:
        return
    lab.say(RULE, "rule")
    rows: list[list[Any]] = []
    curves = {}
    for number, course in enumerate(courses):
        found = [of_rank[number] for of_rank in everyone if of_rank is not None and of_rank[number] is not None]
        for seen in found:
            rows += [[course.policy.name, *row] for row in seen["rows"]]
            curves[course.policy.name] = rate(seen["commits"], lab.config.batch)
            record = ", ".join(f"from step {first} {' '.join(map(str, ranks))}" for first, ranks in seen["record"])
            lab.say(f"{course.policy.name}: {record}", "members")
    if rows:
        lab.table("What each change of members cost, as the first member saw it", COLUMNS, rows)
    lab.chart("Samples a second; a gap is a change of members", "s since the variant began", "samples/s", curves)


def told(rank: int, course: Course) -> dict[str, Any] | None:
    """What the first member at the end tells of its variant; None from all others."""
    if not course.finished or rank != members_at(course.record, course.training.steps)[0]:
        return None
    return {
        "rows": [row(event) for event in course.events],
        "commits": course.commits,
        "record": course.record,
    }


def row(event: Event) -> list[Any]:
    """An event as a row of the table."""
    agreed, after = (1000 * (at - event.began_at) for at in (event.agreed_at, event.next_step_at or event.agreed_at))
    redone = max(0, event.applied_before - event.applied)
    members = [" ".join(map(str, ranks)) for ranks in (event.before, event.after)]
    cells = [event.why.partition(":")[0], event.applied, *members, redone, round(agreed, 1), round(after, 1)]
    return [*cells, round(event.next_step_at, 3)]


def rate(commits: list[list[float]], batch: int) -> list[list[float]]:
    """Samples a second in WINDOWS equal windows of the time from the first step to the last: [times, rates]."""
    times = [at for at, _ in commits]
    window = max((times[-1] - times[0]) / WINDOWS, 1e-3)
    counts = [0] * (WINDOWS + 1)
    for at in times:
        counts[min(WINDOWS, int((at - times[0]) / window))] += 1
    return [[number * window for number in range(WINDOWS)], [batch * count / window for count in counts[:WINDOWS]]]
