"""What each rank did when, as sections of a page: a Gantt a variant, how much communication was hidden, and the
profile.

The page may hold 5 MB and Plotly takes 4.8 of them, so the Gantts take what the rest of the page has left. Where the
bars of all ranks and variants are more than that, the narrowest are joined with their neighbours or left out, those
below a pixel first.
"""

from collections.abc import Iterator, Sequence

import plotly.graph_objects as go

from workers.report import charts
from workers.report.claims import Run
from workers.report.judge import PROOF, SCRIPT
from workers.report.markup import Markup, section, table, text
from workers.report.records import Ranks
from workers.report.spans import (
    CLASSES,
    KINDS,
    NUMBERED,
    Span,
    bubble_sentence,
    hidden,
    profiles,
    slowest_rank,
    step_seconds,
    timelines,
)
from workers.report.units import milliseconds, share

EDGE = {"width": 0.6, "color": "rgba(255,255,255,.6)"}  # between one microbatch and the next
BYTES_A_BAR = 34
BYTES_A_GANTT = 2500
MOST_PROFILES = 64  # rows, of variants and ranks: 14 of 8 took 26 kB of the page
LEAST_SHARE = 1 / 4000  # of a step: a quarter of a pixel on a desk

OfRanks = list[list[Span]]


def gantts(run: Run, records: Ranks, room_bytes: int) -> Markup:
    """A Gantt a variant, in about `room_bytes` of the page, and what the profiled pass saw hidden."""
    found = timelines(records, run["world_size"])
    bars = fitted(found, (room_bytes - BYTES_A_GANTT * len(found)) // BYTES_A_BAR)
    parts = []
    for variant, of_ranks in bars.items():
        about = [f"{milliseconds(step_seconds(found[variant]))} ms", bubble_sentence(run, variant)]
        drawing = charts.drawn(gantt(of_ranks), f"what each rank did in a step of {variant}", 34 + 30 * len(of_ranks))
        told = text(" · ".join(filter(None, about)))
        parts.append(
            f'<figure class="gantt"><figcaption>{text(variant)} <span>{told}</span></figcaption>{drawing}</figure>'
        )
    key = _key(span.kind for of_ranks in bars.values() for spans in of_ranks for span in spans)
    note = "Drag to zoom, double-click to see all."
    if run["run_mode"] in (SCRIPT, PROOF):
        note = f"The script's calls on each rank, from the first one on; their lines are in the labels. {note}"
    else:
        note = (
            "One timed step of each variant, the one of median length, on rank 0's clock and on a scale of its own."
            f" Numbers are microbatches. {note}"
        )
    return section("Timeline", key, *parts, communication_hidden(run, records), note=note if parts else "")


def _key(kinds: Iterator[str]) -> Markup:
    """The colours that were used, and that the ground is idle time."""
    used = set(kinds)
    names: dict[str, str] = {}  # by colour: receive and wait share theirs
    for kind in (kind for kind in KINDS if kind in used):
        name, hue, _ = KINDS[kind]
        names[hue] = f"{names[hue]} or {name}" if hue in names else name
    shown = "".join(f'<span><i style="background:{hue}"></i>{name}</span>' for hue, name in names.items())
    return Markup(f'<div class="key">{shown}<span><i class="idle"></i>idle</span></div>') if names else Markup()


def gantt(of_ranks: OfRanks) -> go.Figure:
    """A row a rank, bars from start to end in ms, one trace a kind; zooms along the time."""
    traces = []
    for kind, (name, hue, width) in KINDS.items():
        bars = [(rank, span) for rank, spans in enumerate(of_ranks) for span in spans if span.kind == kind]
        if not bars:
            continue
        labels = [span.label for _, span in bars]
        numbered = {"text": labels} if len(set(labels)) > 1 else {}  # one microbatch needs no number
        lengths = [_ms(span.end_s - span.start_s) for _, span in bars]
        traces.append(
            go.Bar(
                y=[rank for rank, _ in bars], base=[_ms(span.start_s) for _, span in bars], x=lengths, **numbered,
                customdata=lengths,  # Plotly would tell where a bar ends
                orientation="h", width=width, name=name,
                marker={"color": hue, "line": EDGE if kind in NUMBERED else {"width": 0}},
                textposition="inside" if kind in NUMBERED else "none", insidetextanchor="middle", textangle=0,
                hovertemplate=f"{name}{' %{text}' if numbered else ''} · %{{customdata:.3f}} ms<extra></extra>",
            )
        )  # fmt: skip
    figure = charts.framed(traces, "", "")
    ranks = list(range(len(of_ranks)))
    figure.update_layout(
        barmode="overlay",
        dragmode="zoom",
        showlegend=False,
        hovermode="closest",
        uniformtext={"mode": "hide", "minsize": 9},
    )
    figure.update_xaxes(
        fixedrange=False, range=[0, _ms(step_seconds(of_ranks))], ticksuffix=" ms", showticksuffix="last", title=None
    )
    figure.update_yaxes(
        range=[len(ranks) - 0.5, -0.5], tickvals=ranks, ticktext=[f"rank {rank}" for rank in ranks], showgrid=False,
        ticks="outside", ticklen=6, tickcolor="rgba(0,0,0,0)",
    )  # fmt: skip
    return figure


def fitted(found: dict[str, OfRanks], most: int) -> dict[str, OfRanks]:
    """The spans as at most about `most` bars: all of them, or without those below a share of their step that grows."""
    share, bars = LEAST_SHARE, found
    while share < 1 and sum(len(spans) for of_ranks in bars.values() for spans in of_ranks) > most:
        bars = {
            name: [coarse(spans, share * step_seconds(of_ranks)) for spans in of_ranks]
            for name, of_ranks in found.items()
        }
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
    return [span for row in of_kind.values() for span in row if span.end_s - span.start_s >= least_s]


def communication_hidden(run: Run, records: Ranks) -> Markup:
    """By variant and rank, how much of the communication in the profiled step ran during the backward pass."""
    cells = hidden(records, run["world_size"])
    if not cells:
        return Markup()
    ranks = [f"rank {rank}" for rank in range(run["world_size"])]
    note = (
        "Of the time in which a collective or a send of this rank was under way (a send: until it was waited for), the"
        " share in which the rank computed its backward pass. Seen in one step under the profiler; the spans of all"
        " ranks are in trace.json, which ui.perfetto.dev opens."
    )
    shown = table(["variant", *ranks], [[name, *row] for name, row in cells.items()], range(1, len(ranks) + 1))
    return Markup(f'<h3>Communication hidden</h3><p class="sub">{text(note)}</p>{shown}')


def training_profile(run: Run, records: Ranks) -> Markup:
    """Where the time of a step went, a row a variant and rank, and the slowest rank of each variant."""
    rows = []
    found = profiles(records, run["world_size"])
    all_ranks = len(found) * run["world_size"] <= MOST_PROFILES
    for variant, of_ranks in found.items():
        slowest, ratio = slowest_rank(of_ranks)
        for rank, seconds in enumerate(of_ranks):
            if seconds is None or (rank != slowest and not all_ranks):
                continue
            total = sum(seconds.values())
            cells = [share(seconds.get(kind, 0.0), total) for kind in CLASSES]
            word = f"slowest, {ratio:.2f} ×" if rank == slowest and len(of_ranks) > 1 else ""
            rows.append([variant, rank, milliseconds(total), *cells, word])
    note = (
        "Median milliseconds of a step on each rank, in brackets per cent of their sum; what lies inside another counts"
        " for the inner one. Slowest is the rank with the most work of its own (data, forward, backward, optimizer), so"
        " many times that of the fastest: the others wait for it, partly inside their communication."
        + ("" if all_ranks else " Of so many variants the slowest rank alone is shown; the others are in the records.")
    )
    columns = ["variant", "rank", "ms", *CLASSES, ""]
    return section("Training profile", table(columns, rows, numbers=range(1, len(columns) - 1)), note=note)


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 3)
