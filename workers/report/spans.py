"""What the ranks wrote of their time, as page and log both show it: who did what when, and who is slowest.

Slowest is the rank with the most time in work of its own: data, forward, backward, optimizer. Time in communication
does not tell: a collective ends for all at once, so the ranks that wait for a slow one spend it inside the call, and a
total with communication would name any of them. (DDP waits unmarked inside its backward pass: there ranks come out
alike.)
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from workers.report.claims import Run
from workers.report.records import Profile, Ranks, Timeline, select

OWN_WORK = ("data", "forward", "backward", "input", "weight", "optimizer")
CLASSES = ("data", "forward", "backward", "communication", "optimizer", "waiting")

# Outer kinds first: later ones are drawn over them, and lower. Colours hold 4.5:1 to white text, 3:1 to both grounds.
KINDS = {
    "data": ("data", "#8a6a3a", 0.82), "forward": ("forward", "#2b6ce0", 0.82),
    "backward": ("backward", "#bf4f10", 0.82), "input": ("backward: inputs", "#bf4f10", 0.82),
    "weight": ("backward: weights", "#9a5b2c", 0.82), "optimizer": ("optimizer", "#12805c", 0.82),
    "all_reduce": ("all-reduce", "#8b4fd8", 0.56),
    "all_gather": ("all-gather", "#b83c86", 0.56), "reduce_scatter": ("reduce-scatter", "#0b7f8c", 0.56),
    "send": ("send", "#7a6a12", 0.56), "receive": ("receive", "#6b7686", 0.16), "wait": ("wait", "#6b7686", 0.16),
}  # fmt: skip
NUMBERED = ("forward", "backward", "input", "weight")  # bars that bear their microbatch

Profiles = list[dict[str, float] | None]  # seconds of a step by class, of each rank


class Span(NamedTuple):
    """A stretch of one rank's step, in seconds since the step's start."""

    kind: str
    label: str
    start_s: float
    end_s: float


def timelines(records: Ranks, world_size: int) -> dict[str, list[list[Span]]]:
    """By variant the spans of each rank in one step, outer ones before those that lie inside them."""
    found: dict[str, list[list[Span]]] = {}
    for rank, timeline in select(records, Timeline):
        of_ranks = found.setdefault(timeline.variant, [[] for _ in range(world_size)])
        spans = [Span(*span) for span in timeline.spans]
        of_ranks[rank] = sorted(spans, key=lambda span: (span.start_s, -span.end_s))
    return {name: of_ranks for name, of_ranks in found.items() if any(of_ranks)}


def step_seconds(of_ranks: Sequence[Sequence[Span]]) -> float:
    """The end of the last span of all ranks."""
    return max((span.end_s for spans in of_ranks for span in spans), default=0.0)


def profiles(records: Ranks, world_size: int) -> dict[str, Profiles]:
    """By variant where the time of a step went on each rank; None where a rank wrote nothing."""
    found: dict[str, Profiles] = {}
    for rank, profile in select(records, Profile):
        found.setdefault(profile.variant, [None] * world_size)[rank] = profile.seconds
    return found


def own_work(seconds: dict[str, float]) -> float:
    """Seconds of a step in which no other rank can hold this one up."""
    return sum(seconds.get(kind, 0.0) for kind in OWN_WORK)


def slowest_rank(of_ranks: Profiles) -> tuple[int, float]:
    """The rank with the most work of its own, and its ratio to the rank with the least (infinite if that has none)."""
    work = {rank: own_work(seconds) for rank, seconds in enumerate(of_ranks) if seconds is not None}
    slowest, least = max(work, key=lambda rank: work[rank]), min(work.values())
    return slowest, work[slowest] / least if least else float("inf")


def bubble_sentence(run: Run, variant: str) -> str:
    """Measured beside the formula, as "bubble 0.31 measured, 0.27 by (p-1)/(m+p-1)"; empty where none was compared."""
    claims: list[dict[str, Any]] = run["comparisons"]
    for claim in claims:
        if (claim["variant"], claim["name"]) == (variant, "bubble"):
            formula = claim["formula"] or "the formula"
            return f"bubble {claim['measured']:.2f} measured, {claim['predicted']:.2f} by {formula}"
    return ""
