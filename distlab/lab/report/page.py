"""The report of one run, from its records: claims, results, costs, and the command to repeat it.

The order and the text are in templates/report.html; this file provides the data.
"""

from collections.abc import Iterator
from pathlib import Path
from statistics import quantiles
from typing import Any

from distlab.lab.report import charts, cost_charts, sentences, tables
from distlab.lab.report.charts import Drawing
from distlab.lab.report.glossary import COLUMNS
from distlab.lab.report.html import render
from distlab.lab.report.rank_log import RankLog
from distlab.lab.report.reading import write_atomically
from distlab.lab.report.records import Changed, Chart, End, Lesson, Losses, Noted, Ranks, Run, Said, Start, Told, select
from distlab.lab.report.records import Table as OwnTable
from distlab.lab.report.story import Line
from distlab.lab.report.table import Column, Table, Verdict
from distlab.lab.report.timeline_panels import Drawn, coordinates, timeline
from distlab.lab.report.units import allowed, counted, difference, human_bytes, milliseconds
from distlab.lab.report.verdict import PROOF as PROVEN
from distlab.lab.report.verdict import SCRIPT, first, passes, pytorch_own, slowest

LEAST_SAMPLES = 4  # steps of each variant: with fewer, quartiles say nothing
MOST_STORIES = 16  # ranks next to each other
STORY_COLUMNS = 80
MOST_ROWS = 400  # of all tables of the lesson, about 60 kB


def write_page(
    folder: Path, run: Run, records: Ranks, path: Path | None = None, plan: tables.Plan | None = None
) -> Path:
    """Write `report.html` into the folder of the run, or to another path; return the path."""
    path = path or folder / "report.html"
    write_atomically(path, [page(run, records, plan)])
    return path


def page(run: Run, records: Ranks, plan: tables.Plan | None = None) -> str:
    """Return the whole page as HTML; `plan` is the planner's prediction for the run, if there is one."""
    planned = tables.planned(run, plan) if plan else None
    return render("report.html", **contents(run, records), plan=plan, planned=planned)


def contents(run: Run, records: Ranks) -> dict[str, Any]:
    """Return the page's contents, in order, by name in the template."""
    start = first(records)
    colour = charts.colours(variant["name"] for variant in run["variants"])
    drawn = timeline(run, records)
    return {
        "run": run,
        "start": start,
        "headline": sentences.headline(run),
        "proof_note": sentences.proof_note(run),
        "mistake": [sentences.mistake_sentence(run), sentences.caught_sentence(run)] if run["mistake"] else [],
        "wrong": list(wrong(run)),
        "timeline": drawn,
        "hint": drawn.hint if drawn else "",
        "load": [sentences.load_sentence(machine) for machine in run["machines"]],
        "tiles": list(tiles(run, records, drawn)),
        "of_script": run["run_mode"] in (SCRIPT, PROVEN),
        "stories": stories(records, run["verdict"]),
        "lesson": next((lesson_of(run, lesson) for _, lesson in select(records, Lesson)), None),
        "notes": list(dict.fromkeys(note for _, note in select(records, Said))),
        "own": list(mode_tables_and_charts(records, colour)),
        "faults": tables.faults(run),
        "changing": any(True for _ in select(records, Changed)),
        "columns": COLUMNS,
        **claims(run),
        **costs_of(run, records, colour),
        "ranks": ranks(run, records),
        "skipped": skipped(run),
        "command_line": sentences.repeat_command(records),
        "settings": [(name, setting_text(value), name in start.repeat) for name, value in start.config.items()],
        "versions": [(name, version, False) for name, version in start.versions.items()],
    }


def stories(records: Ranks, verdict: str) -> list[tuple[int, list[Line]]]:
    """Return the logs of the first MOST_STORIES ranks that have a step or notes."""
    found = []
    for rank in sorted(records)[:MOST_STORIES]:
        log = RankLog(width=STORY_COLUMNS)
        lines = [line for record in records[rank] for line in log.lines(record)]
        if any(isinstance(record, Told | Noted) for record in records[rank]):
            checks = log.deciding_checks()
            own = f"{verdict.upper()}: {sum(map(passes, checks))} of {counted(len(checks), 'checks')} of mine passed"
            found.append((rank, [*lines, Line(own)]))
    return found


def claims(run: Run) -> dict[str, Any]:
    """Return the tables of claims and results."""
    checks = [check for check in run["checks"] if check["name"] not in tables.PROOF]
    return {
        "proof": tables.proof(run),
        "timed": tables.timed(run),
        "failed_checks": tables.checks(each for each in checks if not each["passed"]),
        "checks": tables.checks(each for each in checks if each["passed"]),
        "failed_comparisons": tables.comparisons(each for each in run["comparisons"] if not each["passed"]),
        "comparisons": tables.comparisons(each for each in run["comparisons"] if each["passed"]),
    }


def costs_of(run: Run, records: Ranks, colour: dict[str, str]) -> dict[str, Any]:
    """Return losses, bytes, times and memory."""
    losses = curves(records)
    profile = tables.profile(run, records, slowest_only=False)
    many = len(profile.rows) > tables.MOST_PROFILES
    return {
        "losses": loss_chart(losses, colour),
        "first_and_last": first_and_last(losses),
        "sources": cost_charts.SOURCES,
        "matrix_ranks": cost_charts.MATRIX_RANKS,
        "traffic": cost_charts.traffic(run, records),
        "step_times": cost_charts.step_times(records, colour),
        "measured": tables.measured(run, records),
        "profile": tables.profile(run, records, slowest_only=True) if many else profile,
        "many_profiles": many,
        "classes": cost_charts.MEMORY_COLOURS,
        "memory_by_class": cost_charts.memory_by_class(run),
        "memory_over_the_step": cost_charts.memory_over_the_step(records),
        "memory": tables.memory(run, records),
        "memory_by_rank": cost_charts.memory_by_rank(run),
    }


def wrong(run: Run) -> Iterator[str]:
    """Yield what failed, and what ended a rank."""
    yield from map(sentences.failure_sentence, sentences.failures(run))
    yield from map(sentences.lost_sentence, run["lost"])
    yield from sentences.error_sentences(run)
    if run["unseen"]:
        yield sentences.unseen_sentence(run)


def tiles(run: Run, records: Ranks, drawn: Drawn | None) -> Iterator[tuple[str, str]]:
    """Yield the most important numbers, each with its meaning."""
    proof = [check for check in run["checks"] if check["name"] in tables.PROOF]
    if proof:
        failed, plain = ([c for c in proof if not c["passed"]], [c for c in proof if not c["unit"]])
        # For numbers of several units there is no largest, so the one closest to its tolerance is taken.
        worst = max(failed or plain or proof, key=lambda check: check["max_abs_diff"] / (check["tolerance"] or 1.0))
        names = {check["name"] for check in proof}
        # Without losses nothing was trained: primitives are compared, not a run with one process.
        what = "from one process" if "losses" in names else f"of {' and '.join(sorted(names))}"
        what += " in float64" if plain and len(plain) < len(proof) else ""
        yield difference(worst["max_abs_diff"]), f"largest difference {what}, {allowed(worst)} allowed"
    own_name = pytorch_own(run)
    times = {variant["name"]: slowest(variant["step_seconds"]) for variant in run["variants"]}
    by_hand = {name: seconds for name, seconds in times.items() if seconds and name != own_name}
    if by_hand:
        best = fastest(by_hand, records, drawn)
        if not best:
            span = " to ".join(dict.fromkeys(milliseconds(pick(by_hand.values())) for pick in (min, max)))
            yield (
                f"{span} ms",
                f"per step, {counted(len(by_hand), 'variants')} by hand; their times overlap, so none is the fastest",
            )
        elif len(by_hand) == 1:
            yield f"{milliseconds(by_hand[best])} ms", f"per step of {best}, written by hand"
        else:
            yield f"{milliseconds(by_hand[best])} ms", f"per step of {best}, the fastest written by hand"
        if best and own_name and (own_s := times[own_name]):
            yield f"{by_hand[best] / own_s:.2f} ×", f"the time of {own_name}, PyTorch's own"
    wire = {variant["name"]: slowest(variant["wire_bytes"]) for variant in run["variants"]}
    sent = {name: amount for name, amount in wire.items() if amount}
    if sent:
        least = min(sent, key=lambda name: sent[name])
        yield human_bytes(sent[least]), f"on the wire per step, from the rank that sends most ({least})"


def fastest(seconds: dict[str, float], records: Ranks, drawn: Drawn | None) -> str:
    """Return the variant with the shortest steps; empty if another's quartiles overlap, if there are too few steps, or
    if the timeline, of a step that was not timed, shows another as shorter."""
    best = min(seconds, key=lambda name: seconds[name])
    timed = {name: values for name, values in cost_charts.samples(records).items() if name in seconds}
    spread = {name: quartiles(values) for name, values in timed.items()}
    if len(seconds) > 1 and min(map(len, timed.values())) < LEAST_SAMPLES:
        return ""
    if any(spread[best][1] >= low for name, (low, _) in spread.items() if name != best):
        return ""
    shown = {panel.scene.variant: panel.scene.step_s for panel in drawn.panels} if drawn else {}
    shown = {name: step_s for name, step_s in shown.items() if name in seconds}
    return best if shown.get(best, 0.0) <= min(shown.values(), default=0.0) else ""


def quartiles(values: list[float]) -> tuple[float, float]:
    """Return the lower and the upper quartile."""
    low, _, high = quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    return low, high


def lesson_of(run: Run, lesson: Lesson) -> dict[str, Any]:
    """Return the idea in paragraphs, a sentence per variant that ran, and the predictions with their numbers."""
    ran = {variant["name"] for variant in run["variants"]}
    variants = [[name, sentence] for name, sentence in lesson.variants.items() if name in ran]
    predicted = [Column(title) for title in ("variant", "predicted", "formula", "per rank and step", "calls")]
    return {
        "idea": lesson.idea,
        "variants": Table([Column("variant"), Column("what it does")], variants),
        "predictions": Table(predicted, lesson.predictions),
    }


def mode_tables_and_charts(
    records: Ranks, colour: dict[str, str]
) -> Iterator[tuple[str, Drawing | None, Table | None, int]]:
    """Return the mode's own charts and tables, in order: title, kind, and the number of omitted rows."""
    found = [record for rank in sorted(records) for record in records[rank] if isinstance(record, Chart | OwnTable)]
    most = max(8, MOST_ROWS // max(1, sum(isinstance(record, OwnTable) for record in found)))
    series = sum(len(record.series) for record in found if isinstance(record, Chart))
    for record in found:
        if isinstance(record, Chart):
            yield record.title, own_chart(record, colour, max(8, charts.MOST_POINTS // 2 // max(1, series))), None, 0
            continue
        table = Table.of(record.columns, record.rows[:most])
        yield record.title, None, table, len(record.rows) - len(table.rows)


def own_chart(record: Chart, colour: dict[str, str], points: int) -> Drawing:
    """Draw a mode's own chart; a variant has its colour, unless two series would share one."""
    hues = charts.colours(record.series) | {name: colour[name] for name in record.series if name in colour}
    if len(set(hues.values())) < len(hues):
        hues = charts.colours(record.series)
    found: dict[str, charts.Curve] = {name: (xy[0], xy[1]) for name, xy in record.series.items()}
    figure = charts.line_chart(
        found, record.x_label, record.y_label, hues, points=points, log_x=record.log_x, log_y=record.log_y
    )
    return charts.render_chart(figure, record.title, 240)


def curves(records: Ranks) -> dict[str, charts.Curve]:
    """Return the loss curves by variant, one process first; of several ranks, the lowest one's."""
    found: dict[str, charts.Curve] = {}
    for _, losses in select(records, Losses):
        found.setdefault(losses.variant, (list(range(len(losses.values))), losses.numbers))
    return dict(sorted(found.items(), key=lambda item: item[0] != "one process"))


def loss_chart(found: dict[str, charts.Curve], colour: dict[str, str]) -> Drawing | None:
    """Draw all curves in one chart; None without losses."""
    if not found:
        return None
    points = charts.MOST_POINTS // 2 // len(found)
    figure = charts.line_chart(found, "step", "loss", colour, points=points, layered=True)
    return charts.render_chart(figure, "losses by step", 240)


def first_and_last(found: dict[str, charts.Curve]) -> Table:
    """Return one row per curve."""
    rows = [[name, len(y), f"{y[0]:.6g}", f"{y[-1]:.6g}"] for name, (_, y) in found.items() if y]
    return Table([Column(""), *(Column(title, "number") for title in ("steps", "first loss", "last loss"))], rows)


def ranks(run: Run, records: Ranks) -> Table:
    """Return where each rank ran and how it ended."""
    unseen = {each["rank"]: each["host"] or "" for each in run["unseen"]}
    hosts = unseen | {rank: start.host for rank, start in select(records, Start)}
    ends = dict(select(records, End))
    how: dict[int, str | Verdict] = dict.fromkeys(range(run["world_size"]), "cut short")
    how |= dict.fromkeys(ends, "to the end") | dict.fromkeys(unseen, "no records here")
    how |= {error["rank"]: f"code {error['exit_code']}" for error in run["errors"]}
    how |= {lost["rank"]: Verdict("lost") for lost in run["lost"]}
    took = {rank: f"{end.ended_at - end.started_at:.1f} s" for rank, end in ends.items()}
    places = coordinates(records)
    rows = [
        [rank, *([places.get(rank, "")] if places else []), hosts.get(rank, ""), took.get(rank, ""), how[rank]]
        for rank in range(run["world_size"])
    ]
    mesh = [Column("place on the mesh")] if places else []
    columns = [Column("rank", "number"), *mesh, Column("host"), Column("duration", "number"), Column("ended")]
    return Table(columns, rows)


def skipped(run: Run) -> Table:
    """Return the variants that could not run."""
    return Table([Column("variant"), Column("reason")], [[skip["variant"], skip["reason"]] for skip in run["skipped"]])


def setting_text(value: Any) -> str:
    """Return a setting as a user would write it; "unset" without a value."""
    if value is None or value in ("", [], ()):
        return "unset"
    if isinstance(value, bool):
        return str(int(value))
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
