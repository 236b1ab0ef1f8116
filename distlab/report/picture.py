"""The timeline of a run as a file of its own, on a ground of its own, so that it reads in a light page and in a dark
one: templates/picture.svg.

On the page it can be played, zoomed and asked (templates/timeline.js).
"""

import re
from itertools import accumulate

from markupsafe import Markup

from distlab.report.claims import Run
from distlab.report.html import asset, render
from distlab.report.records import Ranks
from distlab.report.timeline_view import Rows, timeline
from distlab.report.verdict import first

WIDTH, LEFT, RIGHT, TOP, BELOW = 960, 82, 28, 98, 88  # pixels, of all and of what is free around the bars
HEADING, GAP = 26, 14  # pixels of the line above a variant's rows, and below them
LIGHT = {
    "--card": "#ffffff", "--ink": "#18202b", "--soft": "#566274", "--line": "#dfe4eb", "--hatch": "#c3ccd8",
}  # fmt: skip


class Untimed(Exception):
    """A run that nothing can be drawn of: the sentence to end with."""


def picture(run: Run, records: Ranks) -> str:
    """The whole SVG; raises Untimed where no rank marked its steps."""
    rows, width = Rows(21, 7), WIDTH - LEFT - RIGHT
    drawn = timeline(run, records, rows)
    if drawn is None:
        raise Untimed("holds no timeline: its mode marks none, or the run ended before its timed steps")
    whole = rows.whole(drawn.num_ranks)
    tops = [TOP + index * (HEADING + whole + GAP) for index in range(len(drawn.panels) + 1)]
    *key_x, last_x = accumulate((19 + 7 * len(name) + 18 for _, name in drawn.key), initial=24)
    start = first(records)
    return render(
        "picture.svg",
        title=f"What {drawn.num_ranks} rank{'s' if drawn.num_ranks > 1 else ''} do in one training step:"
        f" {', '.join(panel.variant for panel in drawn.panels)}",
        style=resolved(asset("marks.css") + asset("picture.css")),
        width=WIDTH, height=tops[-1] + BELOW, left=LEFT, right=WIDTH - RIGHT, top=TOP, bottom=tops[-1],
        panel_width=width, panel_height=whole, heading=HEADING,
        key=[*zip(key_x, drawn.key, strict=True)], key_end=last_x,
        ticks=[(LEFT + width * float(place.rstrip("%")) / 100, name) for place, name in drawn.ticks],
        panels=[(top, panel, shown_at(panel.marks, width)) for top, panel in zip(tops, drawn.panels, strict=False)],
        middles=[rows.middle(rank) for rank in range(drawn.num_ranks)],
        what=start.title, settings=" ".join(f"{name}={value}" for name, value in start.repeat.items()),
    )  # fmt: skip


def shown_at(marks: str, width_px: float) -> Markup:
    """Without the numbers that an axis of this width has no room for: nothing hides them in a file."""

    def kept(text: re.Match[str]) -> str:
        return f'<text class="{text[1]}"{text[3]}' if int(text[2]) <= width_px else ""

    return Markup(re.sub(r'<text class="(\w+) w(\d+)"([^>]*>[^<]*</text>)', kept, str(marks)))


def resolved(style: str) -> Markup:
    """With the colours of the light page in the place of its variables, which a file has not."""
    return Markup(re.sub(r"var\((--\w+)\)", lambda name: LIGHT[name[1]], str(style)))
