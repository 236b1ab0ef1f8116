"""What a run held in memory, as a section of its page: by class at rest, at the peak and over a step, and rank by
rank."""

import math

from workers.report import charts
from workers.report.claims import Run
from workers.report.holdings import fullest
from workers.report.judge import slowest
from workers.report.markup import Markup, grid, section, table, text
from workers.report.records import MemoryLine, Ranks, select
from workers.report.units import byte_unit, human_bytes

CLASSES = ("parameters", "gradients", "optimizer", "activations", "communication")
COLOURS = dict(zip(CLASSES, (charts.PALETTE[index] for index in (0, 2, 3, 1, 5)), strict=True))
NOTE = (
    "Bytes of tensors, with one variant alive at a time, on the rank that holds most. At rest: after the update, before"
    " the next step. Activations: all that is in no other class, temporaries too; communication: what collectives,"
    " sends and receives were given."
)


MOST_PARTS = 600  # of all lines over a step together: 14 variants of 200 parts each took a fifth of the page


def memory(run: Run, records: Ranks) -> Markup:
    """Classes as bars and over the step, then each rank's bytes."""
    parts = [*_by_class(run), *_over_the_step(records)]
    key = "".join(f'<span><i style="background:{hue}"></i>{name}</span>' for name, hue in COLOURS.items())
    tables = (
        [grid([f"<h3>{heading}</h3>{rows}" for heading, rows in _tables(run) if rows], 24)] if run["variants"] else []
    )
    return section(
        "Memory", *([f'<div class="key">{key}</div>', *parts] if parts else []), *tables, note=NOTE if parts else ""
    )


def _by_class(run: Run) -> list[Markup]:
    rows = {}
    for variant in run["variants"]:
        rank = fullest(variant["peak_by_class"])
        if rank is not None:
            rows[f"{variant['name']} · rest"] = variant["rest_by_class"][rank]
            rows[f"{variant['name']} · peak"] = variant["peak_by_class"][rank]
    if not rows:
        return []
    return [charts.drawn(charts.layers(rows, COLOURS), "memory by class, at rest and at the peak", 50 + 30 * len(rows))]


def _over_the_step(records: Ranks) -> list[Markup]:
    """A figure a variant, all on one scale of bytes."""
    lines: dict[str, MemoryLine] = {}
    for _, line in select(records, MemoryLine):
        lines[line.variant] = max(line, lines.get(line.variant, line), key=_most)
    scale, unit = byte_unit(max(map(_most, lines.values()), default=0))
    top = max(map(_most, lines.values()), default=0) / scale
    figures = []
    for name, line in lines.items():
        coarse = coarser(line.held_bytes, MOST_PARTS // len(lines))
        held = {kind: [nbytes / scale for nbytes in values] for kind, values in coarse.items() if any(values)}
        figure = charts.stacked(held, 1000 * line.step_s, COLOURS, f"{unit}", top)
        figures.append(
            f"<figcaption>{text(name)}</figcaption>{charts.drawn(figure, f'memory over a step of {name}', 220)}"
        )
    heading = Markup("<h3>Over the counted step, which takes longer than a timed one</h3>")
    return [heading, grid(figures, 19)] if figures else []


def coarser(held_bytes: dict[str, list[int]], parts: int) -> dict[str, list[int]]:
    """The line in at most so many parts: of those that become one the part that held most, so that the peak stays."""
    columns = list(zip(*held_bytes.values(), strict=True))
    step = max(1, math.ceil(len(columns) / parts))
    kept = [max(columns[start : start + step], key=sum) for start in range(0, len(columns), step)]
    return {kind: [column[index] for column in kept] for index, kind in enumerate(held_bytes)}


def _most(line: MemoryLine) -> int:
    return max((sum(part) for part in zip(*line.held_bytes.values(), strict=True)), default=0)


def _tables(run: Run) -> list[tuple[str, Markup]]:
    """Headings and tables, a row a variant and a column a rank."""
    kinds = {
        "rest_bytes": "At rest",
        "peak_bytes": "At most in the whole pass: its making, and what was there before, included",
        "activation_bytes": "Activations held for the backward pass, at most",
    }
    found = []
    for kind, heading in kinds.items():
        held = {
            variant["name"]: variant[kind] for variant in run["variants"] if slowest(variant.get(kind, [])) is not None
        }
        rows = [
            [name, *("" if nbytes is None else human_bytes(nbytes) for nbytes in ranks)] for name, ranks in held.items()
        ]
        ranks = [f"rank {rank}" for rank in range(run["world_size"])]
        found.append((heading, table(["variant", *ranks], rows, numbers=range(1, len(ranks) + 1))))
    return found
