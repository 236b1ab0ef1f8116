"""Schedules on paper: as long as this run's own passes took, and as if no message took time.

The report shows them beside the step that ran; their idle share is the formula's.
"""

from collections.abc import Callable
from statistics import median

from workers.lab import Lab
from workers.parallel.schedules import Kind, Schedule
from workers.parallel.simulation import simulate
from workers.report import records


def draw_on_paper(lab: Lab, schedule_of: Callable[[str], Schedule | None]) -> None:
    """Write the ideal of each variant that recorded a step and has a schedule; on rank 0, whose passes give the
    lengths."""
    for drawn in [each for each in lab.journal.records if isinstance(each, records.Timeline)]:
        schedule = schedule_of(drawn.variant)
        if schedule is None or lab.rank:
            continue
        lengths: dict[Kind, list[float]] = {action.kind: [] for action in schedule[0]}
        for passed, _, start_s, end_s in drawn.spans:
            if passed in lengths:
                lengths[passed].append(end_s - start_s)
        if not all(lengths.values()):  # of PyTorch's, which splits some backward passes and others not
            continue
        found = simulate(schedule, {kind: median(seconds) for kind, seconds in lengths.items()})
        spans = [[[span.kind, span.label, round(span.start_s, 6), round(span.end_s, 6)] for span in of] for of in found]
        lab.journal.write(records.Ideal(drawn.variant, spans))
