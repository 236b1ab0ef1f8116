"""The timeline of a run: who did what when, every message from its sender to its receiver, each collective with who
came last, and how much of the time is computed, communicated and idle; a row a rank, all variants on one axis of time.

templates/timeline.html shows it on the page, templates/picture.svg in a file, and both draw a variant by
templates/marks.svg. The n-th send of a rank to another belongs to the n-th receive of that one from it, with the same
tag; the n-th collective of a group to the n-th of each of its ranks. Where there is more than a page can hold, short
spans are joined with their neighbours and small messages left out, and `cut` says so.
"""

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from distlab.report.records import Ideal, Messages, Ranks, Run, Timeline, select
from distlab.report.sentences import Shares
from distlab.report.units import counted, human_bytes, milliseconds, round_step
from distlab.report.verdict import PROOF, SCRIPT

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


def bubble_of(run: Run, variant: str) -> Run | None:
    """The comparison of its bubble with the formula, None where none was made."""
    made = (claim for claim in run["comparisons"] if (claim["variant"], claim["name"]) == (variant, "bubble"))
    return next(made, None)


LEAST_SHARE = 1 / 4000  # of a step: a quarter of a pixel on a desk
OWN_WORK = ("data", "forward", "backward", "input", "weight", "optimizer")  # in which no other rank is waited for

OfRanks = list[list[Span]]


class Arrow(NamedTuple):
    """One message: from its sender's send to its receiver's receive."""

    sender: int
    to: int
    nbytes: int
    start_s: float
    end_s: float


class Band(NamedTuple):
    """One collective: when each of its ranks came, and when it had left."""

    op: str
    nbytes: int  # of the tensor
    starts_s: dict[int, float]
    ends_s: dict[int, float]

    @property
    def last(self) -> int:
        """The rank that came last."""
        return max(self.starts_s, key=lambda rank: self.starts_s[rank])

    @property
    def late_s(self) -> float:
        """How long after the first."""
        return max(self.starts_s.values()) - min(self.starts_s.values())

    @property
    def told(self) -> str:
        """What is said of it under the pointer."""
        late = f"rank {self.last} came last, {milliseconds(self.late_s)} ms after the first"
        return f"{self.op} of {human_bytes(self.nbytes)}: {late}"


class Scene(NamedTuple):
    """One variant."""

    variant: str
    of_ranks: OfRanks
    arrows: list[Arrow]
    bands: list[Band]
    sent_bytes: list[float]  # by rank, of all messages, drawn or not
    ideal: OfRanks
    cut: str  # what is not drawn as it was; empty where all is
    steps: int = 1  # that are drawn together

    @property
    def step_s(self) -> float:
        """How long the step took."""
        ends = [arrow.end_s for arrow in self.arrows] + [end for band in self.bands for end in band.ends_s.values()]
        return max(step_seconds(self.of_ranks), *ends, 0.0)

    @property
    def computes(self) -> bool:
        """Whether any rank does."""
        return any(span.kind in OWN_WORK for spans in self.of_ranks for span in spans)

    @property
    def shares(self) -> Shares:
        """How much of the ranks' time is computed, is in a marked call, also one inside of a pass, and is neither."""
        calls = [[span for span in spans if span.kind not in OWN_WORK] for spans in self.of_ranks]
        whole_s = len(self.of_ranks) * self.step_s or 1.0
        marked, called = (sum(map(union_s, spans)) / whole_s for spans in (self.of_ranks, calls))
        return Shares(marked - called, called, 1 - marked)


def scenes(run: Run, records: Ranks, most: int) -> list[Scene]:
    """All variants of a run that recorded a step, of together at most about `most` marks."""
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
    """One variant in at most about `most` marks: all of its spans first, then its largest messages."""
    arrows, bands = arrows_of(calls), bands_of(calls)
    spans = fitted(of_ranks, most * 2 // 3)
    room = max(0, most - sum(map(len, spans)))
    few_bands = largest(bands, [len(band.starts_s) + 2 for band in bands], room)
    room -= sum(len(band.starts_s) + 2 for band in few_bands)
    few_arrows = largest(arrows, [1] * len(arrows), room)
    sent = [sum(call[2] for call in calls.get(rank, [])) for rank in range(len(of_ranks))]
    joined = sum(map(len, of_ranks)) - sum(map(len, spans))
    cuts = [
        f"{joined} spans shorter than a pixel are joined with others of their kind" if joined else "",
        left_out("collectives", bands, few_bands),
        left_out("messages", arrows, few_arrows),
    ]
    steps = max(1, sum(span.kind == "optimizer" for span in of_ranks[0]))
    return Scene(name, spans, few_arrows, few_bands, sent, ideal, ", ".join(filter(None, cuts)), steps)


def left_out(what: str, all_: Sequence[Arrow | Band], drawn: Sequence[Arrow | Band]) -> str:
    """How much of what was sent is not drawn."""
    if len(all_) == len(drawn):
        return ""
    share = sum(each.nbytes for each in drawn) / (sum(each.nbytes for each in all_) or 1)
    return f"the largest {len(drawn)} of {len(all_)} {what} are drawn, {share:.0%} of their bytes"


def largest(all_: list[Any], costs: Sequence[int], room: int) -> list[Any]:
    """Those with the most bytes that fit, in their old order."""
    kept, spent = set(), 0
    for index in sorted(range(len(all_)), key=lambda index: (-all_[index].nbytes, index)):
        if spent + costs[index] > room:
            break
        kept.add(index)
        spent += costs[index]
    return [each for index, each in enumerate(all_) if index in kept]


def arrows_of(calls: dict[int, list[Any]]) -> list[Arrow]:
    """Each send with its receive; one that nobody received ends with its own call."""
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
            waiting = receives[rank, ranks[1], tag] or receives[-1, ranks[1], tag]  # -1: from whoever sends
            received_s = waiting.popleft()[6] if waiting else end_s
            found.append(Arrow(rank, ranks[1], nbytes, start_s, max(received_s, start_s)))
    return found


def bands_of(calls: dict[int, list[Any]]) -> list[Band]:
    """Each collective with the same one of the other ranks in its group."""
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
    """The spans as at most about `most` bars: all of them, or without those below a share of their step that grows."""
    share, bars = LEAST_SHARE, of_ranks
    while share < 1 and sum(map(len, bars)) > most:
        bars = [coarse(spans, share * step_seconds(of_ranks)) for spans in of_ranks]
        share *= 2
    return bars


def coarse(spans: Sequence[Span], least_s: float) -> list[Span]:
    """One rank's spans: short ones of a kind that lie close together as one without a label; what stays short left
    out."""
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
    """Seconds that any of them covers."""
    covered, until = 0.0, 0.0
    for span in sorted(spans, key=lambda span: span.start_s):
        covered += max(0.0, span.end_s - max(span.start_s, until))
        until = max(until, span.end_s)
    return covered


def chunk_of(spans: Sequence[Span]) -> dict[int, int]:
    """By the index of a forward, a backward or part of one: which of the rank's chunks it is; a microbatch passes them
    in order, and backward in the other."""
    times: dict[tuple[str, str], list[int]] = defaultdict(list)
    for index, span in enumerate(spans):
        if span.kind in NUMBERED and span.label:
            times[span.kind, span.label].append(index)
    return {
        index: place if kind == "forward" else len(indices) - 1 - place
        for (kind, _), indices in times.items()
        for place, index in enumerate(indices)
    }


# One variant as it is drawn. Places are per cent of the axis, not pixels, so that bars stretch with the page while
# their numbers keep their size. Light bars are forward, dark ones backward, a colour a microbatch, the same on all
# ranks; a rank's second chunk of the model has a prime behind its number and a dashed edge. A collective is a strip
# below each of its ranks' bars, joined by a line where the last one came; a message is an arrow.

HUES = ("blue", "orange", "teal", "violet", "pink", "olive", "sky", "stone")  # of microbatches, in turn
ORDER = list(KINDS)  # outer kinds first: the others lie over them
PRIME = "\u2032"  # behind a number: of the rank's second chunk
LEAST_NUMBERED_PX = 9  # a narrower bar has no room for its number
WIDTHS_PX = (300, 500, 700, 1000, 1500, 2500, 5000, 10000)  # of the axis, from which a number is shown


class Rows(NamedTuple):
    """Where the rows of a panel stand, in pixels."""

    height: float  # of a rank's bars
    gap: float

    def top(self, rank: int) -> float:
        """The upper edge of a rank's bars."""
        return rank * (self.height + self.gap) + 2

    def middle(self, rank: int) -> float:
        """The middle of them."""
        return self.top(rank) + self.height / 2

    def whole(self, num_ranks: int) -> float:
        """All ranks."""
        return self.top(num_ranks)


class Axis(NamedTuple):
    """The axis of time that all variants share."""

    longest_s: float

    def percent(self, moment_s: float) -> str:
        """Where a moment lies, to a thousandth of a per cent: 0.1 pixels at the widest zoom."""
        return f"{100 * moment_s / (self.longest_s or 1):.3f}".rstrip("0").rstrip(".") + "%"

    def least_width_px(self, bar: "Bar") -> int:
        """Of the axis, from which a bar has room for its number; 0 where it has none at any width, or no number."""
        share = (bar.end_s - bar.start_s) / self.longest_s
        least_px = LEAST_NUMBERED_PX * max(1, len(bar.number) * 0.7)
        return next((width for width in WIDTHS_PX if bar.number and share * width >= least_px), 0)


class Bar(NamedTuple):
    """A span as it is drawn."""

    kind: str
    look: str  # its classes
    share: float  # of the height of its row
    label: str
    number: str  # of its microbatch, which it bears where there are several
    start_s: float
    end_s: float


def bars(spans: Sequence[Span]) -> list[Bar]:
    """The bars of a rank, outer ones first; lighter or darker in the colour of their microbatch."""
    chunks = chunk_of(spans)
    several = len({span.label for span in spans if span.kind in NUMBERED}) > 1
    found = []
    for index, span in sorted(enumerate(spans), key=lambda each: ORDER.index(each[1].kind)):
        look, share, chunk = span.kind, KINDS[span.kind][2], chunks.get(index, 0)
        label = span.label + PRIME * chunk
        if span.kind in NUMBERED:
            microbatch = int(span.label) if span.label.isdecimal() else 0
            look, share = f"{span.kind} {HUES[microbatch % len(HUES)]}{' chunk' if chunk else ''}", 1.0
        number = label if several and span.kind in NUMBERED else ""
        found.append(Bar(span.kind, look, share, label, number, span.start_s, span.end_s))
    return found


MOST_TICKS = 8
MOST_MARKS = 4500  # of all variants of a run of four ranks; more ranks may have more


class Panel(NamedTuple):
    """One variant: what is told beside its name, the bars of each rank, and those of its schedule on paper, if there is
    one."""

    scene: Scene
    told: str
    bars: list[list[Bar]]
    ideal: list[list[Bar]]


class Drawn(NamedTuple):
    """All that is drawn, and said of it."""

    heading: str
    num_ranks: int
    axis: Axis
    rows: Rows
    panels: list[Panel]
    ticks: list[tuple[str, str]]  # where along the axis, and the label
    key: list[tuple[str, str]]  # class and name of each kind of mark
    note: str


def timeline(run: Run, records: Ranks, rows: Rows | None = None) -> Drawn | None:
    """What is drawn of a run, None where no step was recorded."""
    found = scenes(run, records, MOST_MARKS * max(4, min(32, run["world_size"])) // 4)
    if not found:
        return None
    axis = Axis(max(scene.step_s for scene in found))
    # All variants are to be seen at once, and each row still to be read.
    height = max(9.0, min(20.0, 360 / (run["world_size"] * len(found))))
    return Drawn(
        heading(run, found),
        run["world_size"],
        axis,
        rows or Rows(round(height, 1), 6 if height > 12 else 3),
        [
            Panel(
                scene,
                " · ".join(filter(None, [f"{milliseconds(scene.step_s)} ms", share_words(run, scene)])),
                [bars(spans) for spans in scene.of_ranks],
                [bars(spans) for spans in scene.ideal],
            )
            for scene in found
        ],
        list(ticks(axis)),
        key(run, found),
        " ".join(notes(run, found)),
    )


def heading(run: Run, found: Sequence[Scene]) -> str:
    """What is seen."""
    ranks = counted(run["world_size"], "ranks")
    if run["run_mode"] in (SCRIPT, PROOF):
        return f"What {ranks} call, by the lines of the script"
    return f"What {ranks} do: {len(found)} variants on one axis of time" if len(found) > 1 else f"What {ranks} do"


def share_words(run: Run, scene: Scene) -> str:
    """How much of the ranks' time is bubble, as run.json has it; else the shares of the step that is drawn; of one that
    computes nothing there are none."""
    if claim := bubble_of(run, scene.variant):
        return f"idle {claim['measured']:.0%}, {claim['predicted']:.0%} by {claim['formula'] or 'the formula'}"
    return scene.shares.told(seen=scene.variant not in run["by_torch"]) if scene.computes else ""


def ticks(axis: Axis) -> Iterator[tuple[str, str]]:
    """Round milliseconds along the axis: where each is, and its label."""
    longest_ms = 1000 * axis.longest_s
    step_ms = round_step(longest_ms or 1.0, MOST_TICKS)
    for tick in range(int(longest_ms / step_ms) + 1):
        yield axis.percent(tick * step_ms / 1000), f"{tick * step_ms:g} ms" if tick else "0"


def key(run: Run, found: Sequence[Scene]) -> list[tuple[str, str]]:
    """(class, name) of all that is drawn."""
    used = {span.kind for scene in found for spans in scene.of_ranks for span in spans}
    entries = [(f"{kind} blue", KINDS[kind][0]) for kind in NUMBERED if kind in used]
    others = [kind for kind in KINDS if kind in used and kind not in (*NUMBERED, "receive", "wait")]
    entries += [(kind, KINDS[kind][0]) for kind in others]
    entries += [("wait", "waits")] if used & {"receive", "wait"} else []
    return [*entries, ("idle", "your code" if run["run_mode"] in (SCRIPT, PROOF) else "idle")]


def notes(run: Run, found: Sequence[Scene]) -> Iterator[str]:
    """From what it was drawn, how many bytes it holds beside those of the sockets, and what was cut."""
    if run["run_mode"] in (SCRIPT, PROOF):
        yield "From the first call on; the lines stand under the pointer."
        return
    sockets = {variant["name"]: variant["wire_bytes"] for variant in run["variants"]}
    yield (
        "One recorded step of each variant, of three the one of median length, on rank 0's clock; no timed step is"
        " recorded."
    )
    for scene in found:
        wire, sent = sockets.get(scene.variant, [None])[0], scene.sent_bytes[0]
        if sent:
            counted = f", and its sockets {human_bytes(wire * scene.steps)}" if wire else ""
            counted += f" in {scene.steps} steps" if scene.steps > 1 else ""
            yield f"{scene.variant}: rank 0 sends {human_bytes(sent)}{counted}."
    yield from (f"{scene.variant}: {scene.cut}." for scene in found if scene.cut)
