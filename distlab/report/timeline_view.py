"""One variant of the picture as SVG: a row a rank, time to the right in per cent of the axis that all variants share.

Places are per cent, not pixels, so that bars stretch with the page while their numbers keep their size. Light bars are
forward, dark ones backward, a colour a microbatch, the same on all ranks; a rank's second chunk of the model has a
prime behind its number and a dashed edge. A collective is a strip below each of its ranks' bars, joined by a line where
the last one came; a message is an arrow.
"""

import html
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from markupsafe import Markup

from distlab.report.records import Ranks, Run
from distlab.report.timeline_data import KINDS, NUMBERED, Arrow, Band, OfRanks, Scene, Span, chunk_of, scenes
from distlab.report.units import human_bytes, milliseconds, round_step
from distlab.report.verdict import PROOF, SCRIPT

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


def panel(scene: Scene, rows: Rows, longest_s: float) -> str:
    """All marks of a variant."""
    return "".join(
        [
            *(part for rank in range(len(scene.of_ranks)) for part in draw_rank_row(scene, rank, rows, longest_s)),
            *(part for band in scene.bands for part in strip(band, rows, longest_s)),
            *(arrow(each, rows, longest_s) for each in scene.arrows),
        ]
    )


def ideal(of_ranks: OfRanks, rows: Rows, longest_s: float) -> str:
    """The schedule without messages: its bars alone."""
    return "".join(
        part
        for rank, spans in enumerate(of_ranks)
        for part in [f'<g data-r="{rank}">', *bars(spans, rank, rows, longest_s), "</g>"]
    )


def draw_rank_row(scene: Scene, rank: int, rows: Rows, longest_s: float) -> Iterator[str]:
    """One rank: hatched ground for as long as the step takes, and its bars on it."""
    yield f'<g data-r="{rank}">'
    y, width = rows.top(rank), percent(scene.step_s, longest_s)
    yield f'<rect class="idle" x="0" y="{y:g}" width="{width}" height="{rows.height:g}"/>'
    yield from bars(scene.of_ranks[rank], rank, rows, longest_s)
    yield "</g>"


def bars(spans: list[Span], rank: int, rows: Rows, longest_s: float) -> Iterator[str]:
    """The bars of a rank, and their numbers over them."""
    chunks = chunk_of(spans)
    inner = sorted(enumerate(spans), key=lambda each: ORDER.index(each[1].kind))
    yield from (bar(span, chunks.get(index, 0), rank, rows, longest_s) for index, span in inner)
    labels = {span.label for span in spans if span.kind in NUMBERED}
    if len(labels) > 1:  # one microbatch needs no number
        yield from (number(span, chunks.get(index, 0), rank, rows, longest_s) for index, span in inner)


def bar(span: Span, chunk: int, rank: int, rows: Rows, longest_s: float) -> str:
    """A span: as high as its kind is, and lighter or darker in the colour of its microbatch."""
    share = KINDS[span.kind][2] if span.kind not in NUMBERED else 1.0
    y, height = rows.top(rank) + rows.height * (1 - share) / 2, rows.height * share
    look = span.kind
    if span.kind in NUMBERED:
        microbatch = int(span.label) if span.label.isdecimal() else 0
        look = f"{span.kind} {HUES[microbatch % len(HUES)]}" + (" chunk" if chunk else "")
    told = f' data-l="{html.escape(span.label + PRIME * chunk)}"' if span.label else ""
    return (
        f'<rect class="{look}" x="{percent(span.start_s, longest_s)}" y="{y:g}"'
        f' width="{percent(span.end_s - span.start_s, longest_s)}" height="{height:g}"{told}/>'
    )


def number(span: Span, chunk: int, rank: int, rows: Rows, longest_s: float) -> str:
    """The microbatch of a bar, where the axis is wide enough for it; nothing of another kind of bar."""
    share = (span.end_s - span.start_s) / longest_s
    label = span.label + PRIME * chunk
    wide = next((width for width in WIDTHS_PX if share * width >= LEAST_NUMBERED_PX * max(1, len(label) * 0.7)), 0)
    if span.kind not in NUMBERED or not label or not wide:
        return ""
    middle = percent((span.start_s + span.end_s) / 2, longest_s)
    look = f"{span.kind} w{wide}" if wide > WIDTHS_PX[0] else span.kind
    return f'<text class="{look}" x="{middle}" y="{rows.middle(rank) + 4:g}">{html.escape(label)}</text>'


def strip(band: Band, rows: Rows, longest_s: float) -> Iterator[str]:
    """A collective: from when each rank came to when it left, and a line through all where the last one came."""
    told = f"{band.op} of {human_bytes(band.nbytes)}: rank {band.last} came last, {milliseconds(band.late_s)} ms after"
    yield f'<g class="band" data-l="{told} the first">'
    height = max(2.0, rows.height * 0.14)
    for rank, start_s in band.starts_s.items():
        y, width = rows.top(rank) + rows.height - height, percent(band.ends_s[rank] - start_s, longest_s)
        yield f'<rect x="{percent(start_s, longest_s)}" y="{y:g}" width="{width}" height="{height:g}"/>'
    x = percent(band.starts_s[band.last], longest_s)
    first, last = rows.top(min(band.starts_s)) + rows.height, rows.top(max(band.starts_s)) + rows.height
    y = rows.top(band.last) + rows.height - height / 2
    yield f'<line x1="{x}" y1="{first:g}" x2="{x}" y2="{last:g}"/>'
    yield f'<circle cx="{x}" cy="{y:g}" r="{height * 0.8:.1f}"/></g>'


def arrow(each: Arrow, rows: Rows, longest_s: float) -> str:
    """A message, from the sender's row to the receiver's."""
    down = each.to > each.sender
    y1 = rows.top(each.sender) + (rows.height if down else 0)
    y2 = rows.top(each.to) + (0 if down else rows.height)
    return (
        f'<line class="message" x1="{percent(each.start_s, longest_s)}" y1="{y1:g}"'
        f' x2="{percent(each.end_s, longest_s)}" y2="{y2:g}" data-b="{each.nbytes}"'
        f' data-r="{each.sender},{each.to}"/>'
    )


def percent(moment_s: float, longest_s: float) -> str:
    """Where a moment lies on the axis, to a thousandth of a per cent: 0.1 pixels at the widest zoom."""
    return f"{100 * moment_s / (longest_s or 1):.3f}".rstrip("0").rstrip(".") + "%"


# The timeline of a run, as the page and a file of its own show it: all variants on one axis of time, a row a rank.

MOST_TICKS = 8
MOST_MARKS = 4500  # of all variants of a run of four ranks; more ranks may have more


class Panel(NamedTuple):
    """One variant: what is told beside its name, its marks, and those of its schedule on paper, if there is one."""

    variant: str
    told: str
    marks: Markup
    ideal: Markup


class Timeline(NamedTuple):
    """All that is drawn, and said of it."""

    heading: str
    num_ranks: int
    longest_s: float
    rows: Rows
    panels: list[Panel]
    ticks: list[tuple[str, str]]  # where along the axis, and the label
    key: list[tuple[str, str]]  # class and name of each kind of mark
    bands: bool
    arrows: bool
    note: str


def timeline(run: Run, records: Ranks, rows: Rows | None = None) -> Timeline | None:
    """What is drawn of a run, None where no step was recorded."""
    found = scenes(run, records, MOST_MARKS * max(4, min(32, run["world_size"])) // 4)
    if not found:
        return None
    longest_s = max(scene.step_s for scene in found)
    rows = rows or rows_of(run["world_size"], len(found))
    return Timeline(
        heading(run, found),
        run["world_size"],
        longest_s,
        rows,
        [
            Panel(
                scene.variant,
                " · ".join(filter(None, [f"{milliseconds(scene.step_s)} ms", idle_words(run, scene)])),
                Markup(panel(scene, rows, longest_s)),
                Markup(ideal(scene.ideal, rows, longest_s)),
            )
            for scene in found
        ],
        [(percent(at_s, longest_s), name) for at_s, name in ticks(longest_s)],
        key(found),
        any(scene.bands for scene in found),
        any(scene.arrows for scene in found),
        " ".join(notes(run, found)),
    )


def rows_of(num_ranks: int, num_variants: int) -> Rows:
    """Rows that let all variants be seen at once, and each still be read."""
    height = max(9.0, min(20.0, 360 / (num_ranks * num_variants)))
    return Rows(round(height, 1), 6 if height > 12 else 3)


def heading(run: Run, found: Sequence[Scene]) -> str:
    """What is seen."""
    ranks = f"{run['world_size']} rank{'s' if run['world_size'] > 1 else ''}"
    if run["run_mode"] in (SCRIPT, PROOF):
        return f"What {ranks} call, by the lines of the script"
    return f"What {ranks} do: {len(found)} variants on one axis of time" if len(found) > 1 else f"What {ranks} do"


def idle_words(run: Run, scene: Scene) -> str:
    """How much of the ranks' time is bubble, as run.json has it; else what is idle of the step that is drawn; of one
    that computes nothing there is none."""
    for claim in run["comparisons"]:
        if (claim["variant"], claim["name"]) == (scene.variant, "bubble"):
            return f"idle {claim['measured']:.0%}, {claim['predicted']:.0%} by {claim['formula'] or 'the formula'}"
    return f"idle {scene.idle:.0%}" if scene.computes else ""


def ticks(longest_s: float) -> list[tuple[float, str]]:
    """Round milliseconds along the axis."""
    longest_ms = 1000 * longest_s
    step_ms = round_step(longest_ms or 1.0, MOST_TICKS)
    return [
        (tick * step_ms / 1000, f"{tick * step_ms:g} ms" if tick else "0")
        for tick in range(int(longest_ms / step_ms) + 1)
    ]


def key(found: Sequence[Scene]) -> list[tuple[str, str]]:
    """(class, name) of all that is drawn."""
    used = {span.kind for scene in found for spans in scene.of_ranks for span in spans}
    names = {kind: KINDS[kind][0] for kind in KINDS if kind in used and kind not in (*NUMBERED, "receive", "wait")}
    entries = [(f"{kind} blue", KINDS[kind][0]) for kind in NUMBERED if kind in used]
    entries += list(names.items())
    entries += [("wait", "waits")] if used & {"receive", "wait"} else []
    return [*entries, ("idle", "idle")]


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
