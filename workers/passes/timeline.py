"""The chronicle: from the marks of the timed steps to where a rank's time went, and the bubble.

Marks are cheap enough to stay in for the timed steps (workers/parallel/phases.py), so both are of the very steps whose
time is reported; the bubble is the median of all that were kept. What is drawn was recorded after them (recorded.py).
"""

from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import Any

from workers.lab import Lab
from workers.measure.timeline import Clock, bubble, profile
from workers.parallel.phases import COMPUTE, Span

KEPT_STEPS = 20  # of a long run the last ones: what goes to rank 0 does not grow with LAB_STEPS

Bounds = list[Any]  # of a step on one rank: [start_s, end_s, [[kind, start_s, end_s] of each forward and backward]]


class Chronicle:
    """The marks of each variant's last timed steps on this rank."""

    def __init__(self, variants: Sequence[str]) -> None:
        self.steps: dict[str, deque[tuple[int, list[Span]]]] = {name: deque(maxlen=KEPT_STEPS) for name in variants}

    def add(self, variant: str, step: int, spans: list[Span]) -> None:
        """Note what ran in `step`; all ranks note the same steps."""
        self.steps[variant].append((step, spans))

    def profile(self, variant: str) -> dict[str, float]:
        """The median seconds of a step by class."""
        profiles = [profile(spans) for _, spans in self.steps[variant]]
        return {kind: median(each[kind] for each in profiles) for kind in profiles[0]}

    def numbered(self, variant: str, number: int) -> list[tuple[int, list[Span]]]:
        """The marks of each step that is kept, by its place among the `number` of all."""
        steps = self.steps[variant]
        return [(number - len(steps) + index, spans) for index, (_, spans) in enumerate(steps)]

    def bubbles(self, lab: Lab, clock: Clock) -> dict[str, float | None]:
        """The bubble of each variant, on rank 0."""
        mine = {name: [bounds(spans, clock.offset_s)[2] for _, spans in steps] for name, steps in self.steps.items()}
        everyone = lab.exchange.gather("spans", mine)
        return {} if everyone is None else bubbles(everyone)


def in_step(spans: list[Span]) -> list[Span]:
    """Without the fetching of data, after which ranks wait for each other before the step begins."""
    return [span for span in spans if span.kind != "data"]


def bounds(spans: list[Span], offset_s: float) -> Bounds:
    """When a step began and ended on this rank, and its passes, on rank 0's clock."""
    inside = in_step(spans)
    passes = [[span.kind, span.start_s + offset_s, span.end_s + offset_s] for span in inside if span.kind in COMPUTE]
    return [min(span.start_s for span in inside) + offset_s, max(span.end_s for span in inside) + offset_s, passes]


def placed(span: Span, shift_s: float) -> list[Any]:
    """A span as the records hold it, to the microsecond."""
    return [span.kind, span.label, round(span.start_s + shift_s, 6), round(span.end_s + shift_s, 6)]


def bubbles(everyone: list[dict[str, list[list[list[Any]]]]]) -> dict[str, float | None]:
    """The median bubble of each variant; of all ranks [kind, start_s, end_s] of the passes of each step in."""
    found: dict[str, float | None] = {}
    for name in everyone[0]:
        steps = zip(*(of_rank[name] for of_rank in everyone), strict=True)
        values = [
            bubble([[(kind, "", start, end) for kind, start, end in passes] for passes in step]) for step in steps
        ]
        known = [value for value in values if value is not None]
        found[name] = median(known) if known else None
    return found
