"""The planner's answer as a page: memory by rank as bars, the step by stage, and the ranking.

The page is templates/plan.html of the reports, drawn with what answer.py says in words.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from distlab.lab.report.html import render
from distlab.lab.report.table import Column, Table, Verdict
from distlab.lab.report.units import human_bytes, three_digits
from distlab.tools.plan.advice import Plan, loses
from distlab.tools.plan.answer import assumed, ranked, training
from distlab.tools.plan.costs import COMPUTE, EXPOSED, Cost
from distlab.tools.plan.job import Job, shown_count
from distlab.tools.plan.layout import Layout
from distlab.tools.plan.memory import stage_memory

MOST_ROWS = 16  # of stages: of more every so many are drawn
FITS = {True: "fits", False: "too large"}
BACKWARD = 2 / 3  # of a microbatch's time
CLASSES = ("parameters", "gradients", "optimizer", "gathered", "activations", "logits")
STEP = (*COMPUTE, *EXPOSED, "bubble", "update")


class Piece(NamedTuple):
    """A part of a bar: what it is of, where it begins and how long it is in per cent of the axis, and its size in words."""

    kind: str
    start: float
    width: float
    told: str


class Bar(NamedTuple):
    """A row: its name, its pieces, and their sum in words."""

    name: str
    pieces: list[Piece]
    told: str


def plan_page(job: Job, told: Sequence[str], chosen: Plan, given: Cost | None, tokens: float | None) -> str:
    """The whole page, of the given layout or of the one to take; where nothing fits of the one that holds least."""
    shown = given or chosen.pick or min(chosen.costs.values(), key=lambda each: each.held_bytes)
    bars = list(memory_bars(job, shown.layout))
    limit = 100 * job.usable_bytes / axis_bytes(job, shown.layout)
    gantt = list(step_bars(shown))
    return render(
        "plan.html", name=shown.layout.name, fits=FITS[shown.fits], taken=shown is chosen.pick,
        tiles=tiles(job, shown, tokens), memory=bars, limit=limit, usable=human_bytes(job.usable_bytes), step=gantt,
        step_s=three_digits(shown.step_s), classes=in_use(CLASSES, bars), parts=in_use(STEP, gantt),
        ranking=ranking(job, chosen), assumed=Table([Column("of"), Column("taken")], assumed(job, told)),
    )  # fmt: skip


def in_use(names: Sequence[str], bars: Sequence[Bar]) -> list[str]:
    """Those of the names that a bar has a piece of."""
    return [name for name in names if any(piece.kind == name for bar in bars for piece in bar.pieces)]


def tiles(job: Job, shown: Cost, tokens: float | None) -> list[tuple[str, str]]:
    """What is read first: a value, and what it is of."""
    found = [
        (human_bytes(shown.held_bytes), f"a GPU, of {human_bytes(job.usable_bytes)} usable; most are {shown.largest}"),
        (f"{three_digits(shown.step_s)} s", "a step"),
        (f"{shown.mfu:.1%}", "MFU"),
    ]
    found.append((f"{shown_count(shown.tokens_per_s)} tokens/s", "of all GPUs"))
    if tokens:
        whole = training(job, shown, tokens)
        found.append((f"{three_digits(whole['days'])} days", f"{shown_count(whole['gpu_hours'])} GPU-hours"))
    return found


def stages(layout: Layout) -> list[int]:
    """The stages that are drawn, the first and the last among them."""
    last = layout.pipeline - 1
    if last < MOST_ROWS:
        return list(range(layout.pipeline))
    return sorted({round(last * place / (MOST_ROWS - 1)) for place in range(MOST_ROWS)})


def name_of(layout: Layout, stage: int) -> str:
    """The ranks of a stage, which hold as much: they lie one after another."""
    of_each = layout.gpus // layout.pipeline
    first = stage * of_each
    ranks = f"ranks {first} to {first + of_each - 1}" if of_each > 1 else f"rank {first}"
    return f"stage {stage}: {ranks}" if layout.pipeline > 1 else ranks


def axis_bytes(job: Job, layout: Layout) -> float:
    """What the axis of memory ends at."""
    most = max(sum(stage_memory(job, layout, stage).values()) for stage in range(layout.pipeline))
    return 1.05 * max(most, job.usable_bytes)


def memory_bars(job: Job, layout: Layout) -> Iterator[Bar]:
    """Memory of the ranks of each stage, by class."""
    whole = axis_bytes(job, layout)
    for stage in stages(layout):
        start, pieces, held = 0.0, [], stage_memory(job, layout, stage)
        for name in CLASSES:
            if held[name]:
                pieces.append(Piece(name, start, 100 * held[name] / whole, f"{name} {human_bytes(held[name])}"))
                start += 100 * held[name] / whole
        yield Bar(name_of(layout, stage), pieces, human_bytes(sum(held.values())))


def step_bars(shown: Cost) -> Iterator[Bar]:
    """The step of each stage: it waits for its first microbatch, works, waits while the last ones come back and for the
    last stage, which has the vocabulary too, then sums gradients and updates. Parts that alternate by layer and
    microbatch are drawn one behind another."""
    idle_s, last = shown.parts["bubble"], shown.layout.pipeline - 1
    for stage in stages(shown.layout):
        waits = idle_s * stage / last * (1 - BACKWARD) if last else 0.0
        rows = [("bubble", waits)]
        rows += [
            ("bubble" if name == "vocabulary" and stage < last else name, shown.parts[name])
            for name in (*COMPUTE, *EXPOSED)
            if name != "data"
        ]
        rows += [("bubble", idle_s - waits), ("data", shown.parts["data"]), ("update", shown.parts["update"])]
        start, pieces = 0.0, []
        for name, seconds in rows:
            width = 100 * seconds / shown.step_s
            if width > 0:
                pieces.append(Piece(name, start, width, f"{name} {three_digits(seconds)} s"))
            start += width
        yield Bar(name_of(shown.layout, stage), pieces, "")


def ranking(job: Job, chosen: Plan) -> Table:
    """All that were weighed, the best first."""
    columns = [
        Column("layout"), Column(""), Column("step s", "number"), Column("MFU", "number"), Column("memory", "number"),
        Column("why not"),
    ]  # fmt: skip
    rows = [
        [
            each.layout.name,
            Verdict(FITS[each.fits], " take" if each is chosen.pick else ""),
            three_digits(each.step_s),
            f"{each.mfu:.0%}",
            human_bytes(each.held_bytes),
            loses(each, chosen.pick, job),
        ]
        for each in ranked(chosen)
    ]
    return Table(columns, rows)
