"""Schedules on paper: as long as this run's own passes took, and as if no message took time.

The report shows them beside the step that ran; their idle share is the formula's.
"""

from collections.abc import Callable
from statistics import median

from workers.lab import Lab
from workers.parallel.schedules import Schedule
from workers.parallel.simulation import simulate
from workers.report import records


def draw_on_paper(lab: Lab, schedule_of: Callable[[str], Schedule | None]) -> None:
    """Write the ideal of each variant that recorded a step and has a schedule; on rank 0, whose passes give the
    lengths."""
    for drawn in [each for each in lab.journal.records if isinstance(each, records.Timeline)]:
        schedule = schedule_of(drawn.variant)
        lengths = {
            kind: [end_s - start_s for passed, _, start_s, end_s in drawn.spans if passed == kind]
            for kind in ("forward", "backward")
        }
        if schedule is None or lab.rank or not all(lengths.values()):
            continue
        found = simulate(schedule, median(lengths["forward"]), median(lengths["backward"]))
        spans = [[[span.kind, span.label, round(span.start_s, 6), round(span.end_s, 6)] for span in of] for of in found]
        lab.journal.write(records.Ideal(drawn.variant, spans))
