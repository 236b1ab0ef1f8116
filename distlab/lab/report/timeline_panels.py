"""The drawn timeline for the page and files: bars per rank, all variants on one time axis, a legend and notes. Its data
come from timeline.py.

Positions are per cent of the axis, not pixels, so that bars stretch with the page while numbers keep their size. Light
bars are forward, dark ones backward, in their microbatch's colour, which is the same on all ranks; a second chunk of
the model has a prime after its number and a dashed edge. A collective is a strip below its ranks' bars, with a line
where the last one entered; a message is an arrow.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from distlab.lab.report.records import Placed, Ranks, Run, select
from distlab.lab.report.timeline import KINDS, NUMBERED, Scene, Span, bubble_of, chunk_of, scenes
from distlab.lab.report.units import counted, human_bytes, milliseconds, round_step
from distlab.lab.report.verdict import PROOF, SCRIPT

HUES = ("blue", "orange", "lime", "crimson")  # of microbatches, in turn; no phase has a similar one
ORDER = list(KINDS)  # outer kinds first: the others lie over them
PRIME = "\u2032"  # after a number: the rank's second chunk
LEAST_NUMBERED_PX = 9  # a narrower bar has no room for its number
WIDTHS_PX = (300, 500, 700, 1000, 1500, 2500, 5000, 10000)  # of the axis, at which a number appears


class Rows(NamedTuple):
    """The positions of a panel's rows, in pixels."""

    height: float  # of a rank's bars
    gap: float

    def top(self, rank: int) -> float:
        """Return the upper edge of a rank's bars."""
        return rank * (self.height + self.gap) + 2

    def middle(self, rank: int) -> float:
        """Return the middle of a rank's bars."""
        return self.top(rank) + self.height / 2

    def whole(self, num_ranks: int) -> float:
        """Return the height of all ranks."""
        return self.top(num_ranks)


class Axis(NamedTuple):
    """The time axis that all variants share."""

    longest_s: float

    def percent(self, moment_s: float) -> str:
        """Return the position of a moment, to a thousandth of a per cent: 0.1 pixels at the widest zoom."""
        return f"{100 * moment_s / (self.longest_s or 1):.3f}".rstrip("0").rstrip(".") + "%"

    def least_width_px(self, bar: "Bar") -> int:
        """Return the axis width from which a bar has room for its number; 0 if it never has, or has no number."""
        share = (bar.end_s - bar.start_s) / self.longest_s
        least_px = LEAST_NUMBERED_PX * max(1, len(bar.number) * 0.7)
        return next((width for width in WIDTHS_PX if bar.number and share * width >= least_px), 0)


class Bar(NamedTuple):
    """A drawn span."""

    kind: str
    look: str  # its classes
    share: float  # of the height of its row
    label: str
    number: str  # of its microbatch, if there are several
    start_s: float
    end_s: float


def bars(spans: Sequence[Span]) -> list[Bar]:
    """Return the bars of a rank, outer ones first; lighter or darker in the colour of their microbatch."""
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
MOST_MARKS = 4500  # of all variants in a run of four ranks; more ranks may have more


class Panel(NamedTuple):
    """One variant: its caption, the bars of each rank, and those of its simulated schedule, if there is one."""

    scene: Scene
    caption: str
    bars: list[list[Bar]]
    ideal: list[list[Bar]]


class Drawn(NamedTuple):
    """The complete drawing, with its texts."""

    heading: str
    num_ranks: int
    axis: Axis
    rows: Rows
    panels: list[Panel]
    ticks: list[tuple[str, str]]  # position along the axis, and label
    key: list[tuple[str, str]]  # class and name of each kind of mark
    note: str
    names: list[str]  # of the rows
    hint: str  # one sentence: what to look at
    microbatches: int  # number of microbatch colours; 0 with a single microbatch


def timeline(run: Run, records: Ranks, rows: Rows | None = None) -> Drawn | None:
    """Return the drawing of a run, None if no step was recorded."""
    found = scenes(run, records, MOST_MARKS * max(4, min(32, run["world_size"])) // 4)
    if not found:
        return None
    axis = Axis(max(scene.step_s for scene in found))
    panels = [
        Panel(
            scene,
            " · ".join(filter(None, [f"{milliseconds(scene.step_s)} ms", share_words(run, scene)])),
            [bars(spans) for spans in scene.of_ranks],
            [bars(spans) for spans in scene.ideal],
        )
        for scene in found
    ]
    numbers = {bar.number.rstrip(PRIME) for panel in panels for of_rank in panel.bars for bar in of_rank if bar.number}
    # All variants should fit on the screen, with readable rows.
    height = max(9.0, min(20.0, 360 / (run["world_size"] * len(found))))
    return Drawn(
        heading(run, found),
        run["world_size"],
        axis,
        rows or Rows(round(height, 1), 6 if height > 12 else 3),
        panels,
        list(ticks(axis)),
        key(run, found),
        " ".join(notes(run, found)),
        row_names(run, records),
        hint(run, found),
        min(len(numbers), len(HUES)),
    )


def row_names(run: Run, records: Ranks) -> list[str]:
    """Return each rank's name, on a mesh of several axes with its position: "rank 5 · dp1 pp0 tp1"."""
    places = coordinates(records)
    return [" · ".join(filter(None, [f"rank {rank}", places.get(rank, "")])) for rank in range(run["world_size"])]


def coordinates(records: Ranks) -> dict[int, str]:
    """Return each rank's index along each axis with several ranks; empty without records of it, or with a single
    axis."""
    return {
        rank: " ".join(f"{axis}{index}" for axis, (index, size) in placed.axes.items() if size > 1)
        for rank, placed in select(records, Placed)
        if len(placed.axes) > 1
    }


def hint(run: Run, found: Sequence[Scene]) -> str:
    """Return one sentence on what the timeline shows, from its own numbers; empty if they show nothing."""
    if run["run_mode"] in (SCRIPT, PROOF):
        return ""
    bubbles = {scene.variant: claim["measured"] for scene in found if (claim := bubble_of(run, scene.variant))}
    if bubbles:
        return f"See the hatched gaps, in which a rank is idle: {extremes(bubbles)}."
    visible = [scene for scene in found if scene.computes and scene.variant not in run["by_torch"]]
    shares = {scene.variant: scene.shares.communication for scene in visible}
    if shares:
        return f"See how much of a step is communication and waiting: {extremes(shares)}."
    return ""


def extremes(shares: dict[str, float]) -> str:
    """Return the smallest and the largest share of the ranks' time, each with its variant."""
    least, most = (pick(shares, key=lambda name: shares[name]) for pick in (min, max))
    low, high = f"{shares[least]:.0%}", f"{shares[most]:.0%}"
    if low == high:
        return f"{low} of the ranks' time" + (" in each variant" if len(shares) > 1 else "")
    return f"{low} of the ranks' time in {least}, {high} in {most}"


def heading(run: Run, found: Sequence[Scene]) -> str:
    """Return the title of the timeline."""
    ranks = counted(run["world_size"], "ranks")
    if run["run_mode"] in (SCRIPT, PROOF):
        return f"What {ranks} call, by the lines of the script"
    return f"What {ranks} do: {len(found)} variants on one axis of time" if len(found) > 1 else f"What {ranks} do"


def share_words(run: Run, scene: Scene) -> str:
    """Return the bubble's share of the ranks' time from run.json; else the drawn step's shares, or nothing if it
    computes nothing."""
    if claim := bubble_of(run, scene.variant):
        return f"idle {claim['measured']:.0%}, {claim['predicted']:.0%} by {claim['formula'] or 'the formula'}"
    return scene.shares.in_words(seen=scene.variant not in run["by_torch"]) if scene.computes else ""


def ticks(axis: Axis) -> Iterator[tuple[str, str]]:
    """Yield round milliseconds along the axis: position and label."""
    longest_ms = 1000 * axis.longest_s
    step_ms = round_step(longest_ms or 1.0, MOST_TICKS)
    for tick in range(int(longest_ms / step_ms) + 1):
        yield axis.percent(tick * step_ms / 1000), f"{tick * step_ms:g} ms" if tick else "0"


def key(run: Run, found: Sequence[Scene]) -> list[tuple[str, str]]:
    """Return (class, name) of all drawn kinds."""
    used = {span.kind for scene in found for spans in scene.of_ranks for span in spans}
    entries = [(f"{kind} blue", KINDS[kind][0]) for kind in NUMBERED if kind in used]
    others = [kind for kind in KINDS if kind in used and kind not in (*NUMBERED, "receive", "wait")]
    entries += [(kind, KINDS[kind][0]) for kind in others]
    entries += [("wait", "waits")] if used & {"receive", "wait"} else []
    return [*entries, ("idle", "your code" if run["run_mode"] in (SCRIPT, PROOF) else "idle")]


def notes(run: Run, found: Sequence[Scene]) -> Iterator[str]:
    """Yield notes: the step's origin, its bytes compared with the sockets', and what was omitted."""
    if run["run_mode"] in (SCRIPT, PROOF):
        yield "The picture begins with the first call. Point at a mark to see its line of the script."
        return
    sockets = {variant["name"]: variant["wire_bytes"] for variant in run["variants"]}
    yield ("The median of three recorded steps of each variant, on rank 0's clock. Timed steps are not recorded.")
    for scene in found:
        wire, sent = sockets.get(scene.variant, [None])[0], scene.sent_bytes[0]
        if sent:
            counted = f", and its sockets {human_bytes(wire * scene.steps)}" if wire else ""
            counted += f" in {scene.steps} steps" if scene.steps > 1 else ""
            yield f"{scene.variant}: rank 0 sends {human_bytes(sent)}{counted}."
    yield from (f"{scene.variant}: {scene.cut}." for scene in found if scene.cut)
