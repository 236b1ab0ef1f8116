"""The picture of a run: each rank a row, time to the right, every variant on the same axis of time, and all messages.

On the page it can be played, zoomed and asked (player.py); here it is a file of its own, the same drawing on a ground
of its own, so that it reads in a light page and in a dark one.
"""

import html
import re
from collections.abc import Iterator, Sequence

from workers.report import panels
from workers.report.claims import Run
from workers.report.frame import DEFINED, drawn_scenes, key, ticks, told
from workers.report.judge import first
from workers.report.looks import LOOK, resolved
from workers.report.panels import Rows
from workers.report.records import Ranks
from workers.report.scene import Scene

WIDTH, LEFT, RIGHT, TOP, BELOW = 960, 82, 28, 98, 88  # pixels, of all and of what is free around the bars
HEADING = 26  # pixels of the line above a variant's rows


class Untimed(Exception):
    """A run that nothing can be drawn of: the sentence to end with."""


def picture(run: Run, records: Ranks) -> str:
    """The whole SVG; raises Untimed where no rank marked its steps."""
    found = drawn_scenes(run, records)
    if not found:
        raise Untimed("holds no timeline: its mode marks none, or the run ended before its timed steps")
    longest_s = max(scene.step_s for scene in found)
    rows = Rows(21, 7)
    height_of_one = HEADING + rows.whole(run["world_size"]) + 14
    bottom = TOP + len(found) * height_of_one
    height = bottom + BELOW
    ranks = f"{run['world_size']} rank{'s' if run['world_size'] > 1 else ''}"
    title = f"What {ranks} do in one training step: {', '.join(scene.variant for scene in found)}"
    parts = [
        f'<rect class="ground" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1:g}" rx="10"/>',
        words(title, 24, 38, "title"),
        *legend(found),
        *axis(longest_s, bottom),
        *(
            part
            for index, scene in enumerate(found)
            for part in variant(run, scene, rows, TOP + index * height_of_one, longest_s)
        ),
        *caption(records, bottom + 50),
    ]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" role="img"',
            ' aria-labelledby="title">',
            f'<title id="title">{html.escape(title)}</title>',
            f"<style>{resolved(LOOK)}{FILE_LOOK}</style>{DEFINED}",
            *parts,
            "</svg>\n",
        ]
    )


FILE_LOOK = (
    "text{font:13px system-ui,-apple-system,'Segoe UI',Roboto,'Helvetica Neue','Noto Sans','DejaVu Sans',Arial,"
    "sans-serif;fill:#18202b}.title{font-size:19px;font-weight:600}.name{font-size:15px;font-weight:600}.soft{fill:#566274}.small{font-size:11.5px}"
    ".middle{text-anchor:middle}.end{text-anchor:end}.name,.told{paint-order:stroke;stroke:#fff;stroke-width:5px}"
    ".ground{fill:#fff;stroke:#d5dbe3}.tick{stroke:#c3cbd6}"
)


def variant(run: Run, scene: Scene, rows: Rows, top: float, longest_s: float) -> Iterator[str]:
    """One variant: its name, its time and its idle share, then a row a rank."""
    yield words(scene.variant, LEFT, top + 16, "name")
    yield words(told(run, scene), WIDTH - RIGHT, top + 16, "told end")
    for rank in range(len(scene.of_ranks)):
        yield words(f"rank {rank}", LEFT - 10, top + HEADING + rows.middle(rank) + 4.5, "soft end")
    width = WIDTH - LEFT - RIGHT
    marks = shown_at(panels.panel(scene, rows, longest_s), width)
    whole = rows.whole(len(scene.of_ranks))
    yield f'<svg class="panel" x="{LEFT}" y="{top + HEADING:g}" width="{width}" height="{whole:g}">{marks}</svg>'


def shown_at(marks: str, width_px: float) -> str:
    """Without the numbers that an axis of this width has no room for: nothing hides them in a file."""

    def kept(text: re.Match[str]) -> str:
        return f'<text class="{text[1]}"{text[3]}' if int(text[2]) <= width_px else ""

    return re.sub(r'<text class="(\w+) w(\d+)"([^>]*>[^<]*</text>)', kept, marks)


def axis(longest_s: float, bottom: float) -> Iterator[str]:
    """Lines through all variants at round milliseconds, and the milliseconds below them."""
    for moment_s, name in ticks(longest_s):
        x = LEFT + (WIDTH - RIGHT - LEFT) * moment_s / longest_s
        yield f'<line class="tick" x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{bottom:g}"/>'
        yield words(name, x, bottom + 16, "soft middle")


def legend(found: Sequence[Scene]) -> Iterator[str]:
    """The colours that were used, and what is hatched."""
    x = 24.0
    for look, name in key(found):
        yield f'<rect class="{look}" x="{x:.1f}" y="58" width="13" height="13" rx="2"/>'
        yield words(name, x + 19, 69, "soft")
        x += 19 + 7 * len(name) + 18
    yield words("a colour a microbatch", x, 69, "soft")


def caption(records: Ranks, top: float) -> Iterator[str]:
    """What was run, and the settings that were chosen."""
    start = first(records)
    settings = " ".join(f"{name}={value}" for name, value in start.repeat.items())
    yield words(
        f"One recorded step of each variant, of three the one of median length, on rank 0's clock · {start.title}", 24,
        top, "soft",
    )  # fmt: skip
    yield words(settings, 24, top + 20, "soft small")


def words(told: str, x: float, y: float, look: str) -> str:
    """A line of text with its base line at `y`."""
    return f'<text class="{look}" x="{x:.1f}" y="{y:.1f}">{html.escape(told)}</text>'
