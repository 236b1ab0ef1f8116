"""A run as one picture for a page: each rank a row, time to the right, and every variant on the same axis of time.

    python -m workers.report.picture runs/latest docs/picture.svg

The report's chart gives each variant a scale of its own, to look into it; here one scale shows which step is shorter,
and beside it stands how much of it the ranks were idle. It is SVG by hand, on a ground of its own, so that it reads in
a light page and in a dark one.
"""

import argparse
import html
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from workers.report.__main__ import read_and_judge
from workers.report.claims import Run
from workers.report.judge import first
from workers.report.lines import BrokenRecord, write_atomically
from workers.report.records import Ranks
from workers.report.spans import KINDS, NUMBERED, Span, step_seconds, timelines
from workers.report.units import milliseconds

WIDTH, LEFT, RIGHT, TOP, BELOW = 960, 82, 28, 98, 88  # pixels, of all and of what is free around the bars
ROW, GAP, HEADING = 22, 4, 26  # a rank's row, what is free below it, and the line above a variant's rows
LEAST_NUMBERED = 9  # pixels: a narrower bar has no room for its number
MOST_TICKS = 8
ORDER = list(KINDS)  # outer kinds first: the others lie over them
STYLE = (
    "text{font:13px system-ui,-apple-system,'Segoe UI',Roboto,'Helvetica Neue','Noto"
    " Sans',Arial,sans-serif;fill:#18202b}"
    ".title{font-size:19px;font-weight:600}.name{font-size:15px;font-weight:600}.soft{fill:#566274}"
    ".number{font-size:11px;fill:#fff;text-anchor:middle}.middle{text-anchor:middle}.end{text-anchor:end}"
    ".name,.told{paint-order:stroke;stroke:#fff;stroke-width:5px}"  # lines of the axis end before them
    ".ground{fill:#fff;stroke:#d5dbe3}.idle{fill:#e7ebf1}.tick{stroke:#c3cbd6}"
)

OfRanks = list[list[Span]]


class Untimed(Exception):
    """A run that nothing can be drawn of: the sentence to end with."""


def picture(run: Run, records: Ranks) -> str:
    """The whole SVG; raises Untimed where no rank marked its steps."""
    found = timelines(records, run["world_size"])
    if not found:
        raise Untimed("holds no timeline: its mode marks none, or the run ended before its timed steps")
    longest_s = max(step_seconds(of_ranks) for of_ranks in found.values())
    height_of_one = HEADING + run["world_size"] * (ROW + GAP) + 14
    bottom = TOP + len(found) * height_of_one
    height = bottom + BELOW
    panels = [
        part
        for index, (variant, of_ranks) in enumerate(found.items())
        for part in panel(variant, of_ranks, idle_share(run, variant), TOP + index * height_of_one, longest_s)
    ]
    ranks = f"{run['world_size']} rank{'s' if run['world_size'] > 1 else ''}"
    title = f"What {ranks} do in one training step: {', '.join(found)}"
    parts = [
        f'<rect class="ground" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="10"/>',
        words(title, 24, 38, "title"),
        *key(span.kind for of_ranks in found.values() for spans in of_ranks for span in spans),
        *axis(longest_s, bottom),
        *panels,
        *caption(records, bottom + 50),
    ]
    return "\n".join(
        [
            (
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img"'
                ' aria-labelledby="title">'
            ),
            f'<title id="title">{html.escape(title)}</title>',
            f"<style>{STYLE}</style>",
            *parts,
            "</svg>\n",
        ]
    )


def idle_share(run: Run, variant: str) -> str:
    """How much of the ranks' time is bubble, as run.json has it; empty where the mode has none."""
    for claim in run["comparisons"]:
        if (claim["variant"], claim["name"]) == (variant, "bubble"):
            return f"idle {claim['measured']:.0%}, {claim['predicted']:.0%} by {claim['formula'] or 'the formula'}"
    return ""


def panel(variant: str, of_ranks: OfRanks, idle: str, top: float, longest_s: float) -> Iterator[str]:
    """One variant: its name, its time and its idle share, then a row a rank."""
    told = " · ".join(filter(None, [f"{milliseconds(step_seconds(of_ranks))} ms", idle]))
    yield words(variant, LEFT, top + 16, "name")
    yield words(told, WIDTH - RIGHT, top + 16, "told end")
    for rank, spans in enumerate(of_ranks):
        y = top + HEADING + rank * (ROW + GAP)
        yield words(f"rank {rank}", LEFT - 10, y + ROW / 2 + 4.5, "soft end")
        yield bar("idle", 0.0, step_seconds(of_ranks), y, ROW, longest_s)
        for span in sorted(spans, key=lambda span: ORDER.index(span.kind)):
            yield from drawn(span, y, longest_s)


def drawn(span: Span, y: float, longest_s: float) -> Iterator[str]:
    """The bar of a span, as high as its kind is, and in it the number of its microbatch."""
    _, hue, share = KINDS[span.kind]
    yield bar("span", span.start_s, span.end_s, y + ROW * (1 - share) / 2, ROW * share, longest_s, hue)
    start, end = across(span.start_s, longest_s), across(span.end_s, longest_s)
    if span.kind in NUMBERED and end - start >= LEAST_NUMBERED:
        yield words(span.label, (start + end) / 2, y + ROW / 2 + 4, "number")


def bar(kind: str, start_s: float, end_s: float, y: float, height: float, longest_s: float, hue: str = "") -> str:
    """A rectangle from one moment to another."""
    x = across(start_s, longest_s)
    fill = f' fill="{hue}" stroke="#fff" stroke-width="0.4"' if hue else ""
    return (
        f'<rect class="{kind}" x="{x:.1f}" y="{y:.1f}" width="{across(end_s, longest_s) - x:.1f}"'
        f' height="{height:.1f}"{fill}/>'
    )


def across(moment_s: float, longest_s: float) -> float:
    """Where a moment lies, in pixels from the left."""
    return LEFT + (WIDTH - RIGHT - LEFT) * moment_s / longest_s


def axis(longest_s: float, bottom: float) -> Iterator[str]:
    """Lines through all variants at round milliseconds, and the milliseconds below them."""
    longest_ms = 1000 * longest_s
    step_ms = next(
        step
        for power in range(-3, 9)
        for step in (10.0**power, 2 * 10.0**power, 5 * 10.0**power)
        if longest_ms / step <= MOST_TICKS
    )
    for tick in range(int(longest_ms / step_ms) + 1):
        x = across(tick * step_ms / 1000, longest_s)
        yield f'<line class="tick" x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{bottom}"/>'
        yield words(f"{tick * step_ms:g} ms" if tick else "0", x, bottom + 16, "soft middle")


def key(kinds: Iterator[str]) -> Iterator[str]:
    """The colours that were used, and what grey is."""
    used, x = set(kinds), 24.0
    names: dict[str, str] = {}  # by colour: receive and wait share theirs
    for name, hue, _ in (KINDS[kind] for kind in KINDS if kind in used):
        names[hue] = f"{names[hue]} or {name}" if hue in names else name
    for name, look in [*((name, f'fill="{hue}"') for hue, name in names.items()), ("idle", 'class="idle"')]:
        yield f'<rect {look} x="{x:.1f}" y="58" width="13" height="13" rx="2"/>'
        yield words(name, x + 19, 69, "soft")
        x += 19 + 7 * len(name) + 20
    yield words("numbers are microbatches", x, 69, "soft")


def caption(records: Ranks, top: float) -> Iterator[str]:
    """What was run, and the settings that were chosen."""
    start = first(records)
    settings = " ".join(f"{name}={value}" for name, value in start.repeat.items())
    yield words(
        f"One timed step of each variant, the one of median length, on rank 0's clock · {start.title}", 24, top, "soft"
    )
    yield words(settings, 24, top + 20, "soft")


def words(told: str, x: float, y: float, look: str) -> str:
    """A line of text with its base line at `y`."""
    return f'<text class="{look}" x="{x:.1f}" y="{y:.1f}">{html.escape(told)}</text>'


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the records, draw, write; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m workers.report.picture",
        description="Draw one step of each variant of a finished run as an SVG.",
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of a run, such as runs/latest")
    parser.add_argument("file", type=Path, metavar="FILE", help="the SVG to write, such as docs/picture.svg")
    asked = parser.parse_args(arguments)
    try:
        write_atomically(asked.file, [picture(*read_and_judge(asked.run))])
    except (BrokenRecord, Untimed) as error:
        told = f"{asked.run} {error}" if isinstance(error, Untimed) else str(error)
        print(f"refused    {told}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"refused    {asked.file} cannot be written: {error.strerror}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
