"""The chronicle: from the marks of the timed steps to what each rank did when, where its time went, and the bubble.

Marks are cheap enough to stay in for the timed steps (workers/parallel/phases.py), so the picture is of the very steps
whose time is reported. One step of each variant is drawn, the one of median length; the bubble is the median of all
that were kept.
"""

from collections import deque
from collections.abc import Sequence
from statistics import median, median_low
from typing import Any

from workers.lab import Lab
from workers.measure.timeline import Clock, bubble, profile
from workers.parallel.phases import Span
from workers.report import records

KEPT_STEPS = 20  # of a long run the last ones: what goes to rank 0 does not grow with LAB_STEPS

Bounds = list[Any]  # of a step on one rank: [start_s, end_s, [[kind, start_s, end_s] of each forward and backward]]


class Chronicle:
    """The marks of each variant's last timed steps on this rank."""

    def __init__(self, variants: Sequence[str]) -> None:
        self.steps: dict[str, deque[tuple[int, list[Span]]]] = {name: deque(maxlen=KEPT_STEPS) for name in variants}

    def add(self, variant: str, step: int, spans: list[Span]) -> None:
        """Note what ran in `step`; all ranks note the same steps."""
        self.steps[variant].append((step, spans))

    def write(self, lab: Lab, clock: Clock) -> dict[str, float | None]:
        """Write this rank's profiles and one timeline a variant; returns the bubbles, on rank 0."""
        for name, steps in self.steps.items():
            profiles = [profile(spans) for _, spans in steps]
            lab.journal.write(
                records.Profile(name, {kind: median(each[kind] for each in profiles) for kind in profiles[0]})
            )
        mine = {name: [bounds(spans, clock.offset_s) for _, spans in steps] for name, steps in self.steps.items()}
        everyone = lab.exchange.gather("spans", mine)
        chosen, bubbles = ({}, {}) if everyone is None else choose(everyone)
        for name, (index, origin_s) in lab.exchange.share("chosen steps", chosen).items():
            step, spans = self.steps[name][index]
            shift_s = clock.offset_s - origin_s
            lab.journal.write(records.Timeline(name, step, [placed(span, shift_s) for span in in_step(spans)]))
        return bubbles


def in_step(spans: list[Span]) -> list[Span]:
    """Without the fetching of data, after which ranks wait for each other before the step begins."""
    return [span for span in spans if span.kind != "data"]


def bounds(spans: list[Span], offset_s: float) -> Bounds:
    """When a step began and ended on this rank, and its passes, on rank 0's clock."""
    inside = in_step(spans)
    passes = [
        [span.kind, span.start_s + offset_s, span.end_s + offset_s]
        for span in inside
        if span.kind in ("forward", "backward")
    ]
    return [min(span.start_s for span in inside) + offset_s, max(span.end_s for span in inside) + offset_s, passes]


def placed(span: Span, shift_s: float) -> list[Any]:
    """A span as the records hold it, to the microsecond."""
    return [span.kind, span.label, round(span.start_s + shift_s, 6), round(span.end_s + shift_s, 6)]


def choose(everyone: list[dict[str, list[Bounds]]]) -> tuple[dict[str, tuple[int, float]], dict[str, float | None]]:
    """For each variant the index and the start of its step of median length, and the median bubble; all ranks' bounds
    in."""
    chosen, bubbles = {}, {}
    for name in everyone[0]:
        steps = list(zip(*(of_rank[name] for of_rank in everyone), strict=True))
        lengths = [max(end for _, end, _ in step) - min(start for start, _, _ in step) for step in steps]
        index = lengths.index(median_low(lengths))
        chosen[name] = index, min(start for start, _, _ in steps[index])
        found = [
            bubble([[(kind, "", start, end) for kind, start, end in passes] for *_, passes in step]) for step in steps
        ]
        known = [value for value in found if value is not None]
        bubbles[name] = median(known) if known else None
    return chosen, bubbles
