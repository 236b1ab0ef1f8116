"""The timeline of a run, per rank and variant: spans, messages from sender to receiver, collectives with their last
rank, and the shares of compute, communication and idle time.

timeline_panels.py converts it to bars, templates/timeline.html shows it on the page, templates/picture.svg in a file,
and both draw a variant with templates/marks.svg. The n-th send from one rank to another matches that one's n-th receive
from it with the same tag; the n-th collective of a group matches the n-th of its other ranks. If there is too much for
a page, short spans are merged with neighbours and small messages omitted; `cut` says so.
"""

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from distlab.lab.report.records import Ideal, Messages, Ranks, Run, Timeline, select
from distlab.lab.report.sentences import Shares
from distlab.lab.report.units import human_bytes, milliseconds

# Outer kinds first: later ones are drawn over them, and lower. Contrast is 4.5:1 to white text, 3:1 to backgrounds.
KINDS = {
    "data": ("data", "#8a6a3a", 0.82), "forward": ("forward", "#2b6ce0", 0.82),
    "backward": ("backward", "#bf4f10", 0.82), "input": ("backward: inputs", "#bf4f10", 0.82),
    "weight": ("backward: weights", "#9a5b2c", 0.82), "optimizer": ("optimizer", "#12805c", 0.82),
    "all_reduce": ("all-reduce", "#8b4fd8", 0.56),
    "all_gather": ("all-gather", "#b83c86", 0.56), "reduce_scatter": ("reduce-scatter", "#0b7f8c", 0.56),
    "send": ("send", "#7a6a12", 0.56), "receive": ("receive", "#6b7686", 0.16), "wait": ("wait", "#6b7686", 0.16),
}  # fmt: skip
NUMBERED = ("forward", "backward", "input", "weight")  # bars with their microbatch's number


class Span(NamedTuple):
    """An interval of one rank's step, in seconds since the step's start."""

    kind: str
    label: str
    start_s: float
    end_s: float


def timelines(records: Ranks, world_size: int) -> dict[str, list[list[Span]]]:
    """Return by variant the spans of each rank in one step, outer ones before those inside them."""
    found: dict[str, list[list[Span]]] = {}
    for rank, timeline in select(records, Timeline):
        of_ranks = found.setdefault(timeline.variant, [[] for _ in range(world_size)])
        spans = [Span(*span) for span in timeline.spans]
        of_ranks[rank] = sorted(spans, key=lambda span: (span.start_s, -span.end_s))
    return {name: of_ranks for name, of_ranks in found.items() if any(of_ranks)}


def step_seconds(of_ranks: Sequence[Sequence[Span]]) -> float:
    """Return the end of the last span of all ranks."""
    return max((span.end_s for spans in of_ranks for span in spans), default=0.0)


def bubble_of(run: Run, variant: str) -> Run | None:
    """Return the comparison of its bubble with the formula, None if there is none."""
    made = (claim for claim in run["comparisons"] if (claim["variant"], claim["name"]) == (variant, "bubble"))
    return next(made, None)


LEAST_SHARE = 1 / 4000  # of a step: a quarter of a pixel on a desk
OWN_WORK = ("data", "forward", "backward", "input", "weight", "optimizer")  # classes without waiting for other ranks

OfRanks = list[list[Span]]


class Arrow(NamedTuple):
    """A message: from its sender's send to its receiver's receive."""

    sender: int
    to: int
    nbytes: int
    start_s: float
    end_s: float


class Band(NamedTuple):
    """A collective: when each rank entered and left it."""

    op: str
    nbytes: int  # of the tensor
    starts_s: dict[int, float]
    ends_s: dict[int, float]

    @property
    def last(self) -> int:
        """Return the rank that entered last."""
        return max(self.starts_s, key=lambda rank: self.starts_s[rank])

    @property
    def late_s(self) -> float:
        """Return how long after the first it entered."""
        return max(self.starts_s.values()) - min(self.starts_s.values())

    @property
    def tooltip(self) -> str:
        """Return the text under the pointer."""
        late = f"rank {self.last} entered last, {milliseconds(self.late_s)} ms after the first"
        return f"{self.op} of {human_bytes(self.nbytes)}: {late}"


class Scene(NamedTuple):
    """The data of one variant."""

    variant: str
    of_ranks: OfRanks
    arrows: list[Arrow]
    bands: list[Band]
    sent_bytes: list[float]  # by rank, of all messages, including omitted ones
    ideal: OfRanks
    cut: str  # a note on what was merged or omitted; empty if nothing was
    steps: int = 1  # number of steps drawn together

    @property
    def step_s(self) -> float:
        """Return the duration of the step."""
        ends = [arrow.end_s for arrow in self.arrows] + [end for band in self.bands for end in band.ends_s.values()]
        return max(step_seconds(self.of_ranks), *ends, 0.0)

    @property
    def computes(self) -> bool:
        """Return whether any rank computes."""
        return any(span.kind in OWN_WORK for spans in self.of_ranks for span in spans)

    @property
    def shares(self) -> Shares:
        """Return the shares of the ranks' time: compute, marked calls (also inside passes), and the rest."""
        calls = [[span for span in spans if span.kind not in OWN_WORK] for spans in self.of_ranks]
        whole_s = len(self.of_ranks) * self.step_s or 1.0
        marked, called = (sum(map(union_s, spans)) / whole_s for spans in (self.of_ranks, calls))
        return Shares(marked - called, called, 1 - marked)


def scenes(run: Run, records: Ranks, most: int) -> list[Scene]:
    """Return all variants with a recorded step, in about `most` marks in total."""
    found = timelines(records, run["world_size"])
    calls: dict[str, dict[int, list[Any]]] = defaultdict(dict)
    for rank, entry in select(records, Messages):
        calls[entry.variant][rank] = entry.calls
    ideals = {entry.variant: entry.spans for _, entry in select(records, Ideal)}
    share = most // max(1, len(found))
    return [
        scene(name, of_ranks, calls[name], [[Span(*each) for each in spans] for spans in ideals.get(name, [])], share)
        for name, of_ranks in found.items()
    ]


def scene(name: str, of_ranks: OfRanks, calls: dict[int, list[Any]], ideal: OfRanks, most: int) -> Scene:
    """Return one variant in about `most` marks: all of its spans first, then its largest messages."""
    arrows, bands = arrows_of(calls), bands_of(calls)
    spans = fitted(of_ranks, most * 2 // 3)
    room = max(0, most - sum(map(len, spans)))
    few_bands = largest(bands, [len(band.starts_s) + 2 for band in bands], room)
    room -= sum(len(band.starts_s) + 2 for band in few_bands)
    few_arrows = largest(arrows, [1] * len(arrows), room)
    sent = [sum(call[2] for call in calls.get(rank, [])) for rank in range(len(of_ranks))]
    joined = sum(map(len, of_ranks)) - sum(map(len, spans))
    cuts = [
        f"{joined} spans shorter than a pixel are merged with others of their kind" if joined else "",
        left_out("collectives", bands, few_bands),
        left_out("messages", arrows, few_arrows),
    ]
    steps = max(1, sum(span.kind == "optimizer" for span in of_ranks[0]))
    return Scene(name, spans, few_arrows, few_bands, sent, ideal, ", ".join(filter(None, cuts)), steps)


def left_out(what: str, all_: Sequence[Arrow | Band], drawn: Sequence[Arrow | Band]) -> str:
    """Return a note on how many messages and bytes are drawn."""
    if len(all_) == len(drawn):
        return ""
    share = sum(each.nbytes for each in drawn) / (sum(each.nbytes for each in all_) or 1)
    return f"the largest {len(drawn)} of {len(all_)} {what} are drawn, {share:.0%} of their bytes"


def largest(all_: list[Any], costs: Sequence[int], room: int) -> list[Any]:
    """Return those with the most bytes that fit, in their old order."""
    kept, spent = set(), 0
    for index in sorted(range(len(all_)), key=lambda index: (-all_[index].nbytes, index)):
        if spent + costs[index] > room:
            break
        kept.add(index)
        spent += costs[index]
    return [each for index, each in enumerate(all_) if index in kept]


def arrows_of(calls: dict[int, list[Any]]) -> list[Arrow]:
    """Match each send with its receive; a send without a receive ends with its own call."""
    receives: dict[tuple[int, int, int], deque[list[Any]]] = defaultdict(deque)
    for rank in sorted(calls):
        for call in calls[rank]:
            if call[0] == "recv":
                receives[call[1][0], rank, call[4]].append(call)
    found = []
    for rank in sorted(calls):
        for op, ranks, _, nbytes, tag, start_s, end_s in calls[rank]:
            if op != "send":
                continue
            waiting = receives[rank, ranks[1], tag] or receives[-1, ranks[1], tag]  # -1: from any sender
            received_s = waiting.popleft()[6] if waiting else end_s
            found.append(Arrow(rank, ranks[1], nbytes, start_s, max(received_s, start_s)))
    return found


def bands_of(calls: dict[int, list[Any]]) -> list[Band]:
    """Match each collective with the same one on the other ranks of its group."""
    found: dict[tuple[tuple[int, ...], int], Band] = {}
    for rank in sorted(calls):
        turns: dict[tuple[int, ...], int] = defaultdict(int)
        for op, ranks, _, nbytes, _, start_s, end_s in calls[rank]:
            if op in ("send", "recv"):
                continue
            group = tuple(ranks)
            band = found.setdefault((group, turns[group]), Band(op, nbytes, {}, {}))
            band.starts_s[rank], band.ends_s[rank] = start_s, end_s
            turns[group] += 1
    return list(found.values())


def fitted(of_ranks: OfRanks, most: int) -> OfRanks:
    """Return the spans as about `most` bars at most: all, or without those below a growing share of their step."""
    share, bars = LEAST_SHARE, of_ranks
    while share < 1 and sum(map(len, bars)) > most:
        bars = [coarse(spans, share * step_seconds(of_ranks)) for spans in of_ranks]
        share *= 2
    return bars


def coarse(spans: Sequence[Span], least_s: float) -> list[Span]:
    """Merge one rank's short, close spans of a kind into one without a label; drop those that stay short."""
    of_kind: dict[str, list[Span]] = {}
    for span in spans:
        row = of_kind.setdefault(span.kind, [])
        before = row[-1] if row else None
        short = span.end_s - span.start_s < least_s
        if before and short and before.end_s - before.start_s < 2 * least_s and span.start_s - before.end_s < least_s:
            row[-1] = Span(span.kind, "", before.start_s, max(before.end_s, span.end_s))
        else:
            row.append(span)
    kept = [span for row in of_kind.values() for span in row if span.end_s - span.start_s >= least_s]
    return sorted(kept, key=lambda span: (span.start_s, -span.end_s))


def union_s(spans: Iterable[Span]) -> float:
    """Return the seconds that any of them covers."""
    covered, until = 0.0, 0.0
    for span in sorted(spans, key=lambda span: span.start_s):
        covered += max(0.0, span.end_s - max(span.start_s, until))
        until = max(until, span.end_s)
    return covered


def chunk_of(spans: Sequence[Span]) -> dict[int, int]:
    """Return the rank's chunk number for each forward and backward (part), by index; a microbatch passes the chunks in
    order, and in reverse in the backward."""
    times: dict[tuple[str, str], list[int]] = defaultdict(list)
    for index, span in enumerate(spans):
        if span.kind in NUMBERED and span.label:
            times[span.kind, span.label].append(index)
    return {
        index: place if kind == "forward" else len(indices) - 1 - place
        for (kind, _), indices in times.items()
        for place, index in enumerate(indices)
    }
