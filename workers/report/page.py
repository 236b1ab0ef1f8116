"""The report of one run, from its records: what was claimed, whether it held, what it cost, and how to repeat it.

The order is that of a teacher: did it hold, the picture of a step, what the lesson is and what it predicted, its own
figures; then the evidence: checks, losses, bytes, time, memory, settings. Charts never stand alone: the same numbers
are in a table or in the records.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from workers.report import charts, costs, held, memory, pace, profile
from workers.report.blocks import PROOF
from workers.report.claims import Run
from workers.report.judge import PROOF as PROVEN
from workers.report.judge import SCRIPT, first, pytorch_own, slowest
from workers.report.lines import write_atomically
from workers.report.markup import Markup, chip, code, document, folded, grid, section, table, text
from workers.report.records import Chart, End, Lesson, Losses, Ranks, Said, Start, Table, select
from workers.report.sentences import (
    error_sentences,
    failure_sentence,
    failures,
    headline,
    lost_sentence,
    mistake_sentence,
    proof_note,
    repeat_command,
    seen_sentence,
    unseen_sentence,
)
from workers.report.stage import stage
from workers.report.units import allowed, difference, human_bytes, milliseconds

PRINTED = (
    "On paper: the first ten rows of a table, and neither the mode's own figures nor losses, bytes, time and memory;"
    " the page has all."
)
MOST_ROWS = 400  # of all tables of the lesson together, about 60 kB


def write_page(folder: Path, run: Run, records: Ranks, path: Path | None = None) -> Path:
    """Write `report.html` into the folder of the run, or to another path; returns it."""
    path = path or folder / "report.html"
    write_atomically(path, [page(run, records)])
    return path


def page(run: Run, records: Ranks) -> str:
    """The whole page as HTML."""
    colour = charts.colours(variant["name"] for variant in run["variants"])
    return document(
        f"{run['verdict']} · {run['run_id']}",
        [
            charts.look(),
            _head(run, records),
            _ended(run),
            stage(run, records),
            _tiles(run),
            _lesson(run, records),
            f'<p class="paper-only">{PRINTED}</p>',
            '<div class="own">',
            *_own(records, colour),
            "</div>",
            pace.pace(run, records),
            held.drills(run),
            held.checks(run),
            '<div class="evidence">',
            held.comparisons(run),
            _losses(records, colour),
            costs.traffic(run, records),
            costs.time(run, records, colour),
            profile.training_profile(run, records),
            profile.communication_hidden(run, records),
            memory.memory(run, records),
            _ranks(run, records),
            "</div>",
            _settings(records),
        ],
    )


def _head(run: Run, records: Ranks) -> Markup:
    start = first(records)
    ranks = f"{run['world_size']} rank{'s' if run['world_size'] != 1 else ''}"
    what = " · ".join(part for part in (run["run_mode"], ranks, start.title) if part)
    note = f'<p class="sub">{text(proof_note(run))}</p>' if proof_note(run) else ""
    return Markup(
        f'<header class="{run["verdict"]}"><div class="verdict">{chip_of(run)}<span>{text(headline(run))}</span></div>'
        f'{_mistake(run)}<h1>{text(what)}</h1><p class="sub">run {text(run["run_id"])}</p>{note}</header>'
    )


def _mistake(run: Run) -> Markup:
    """Which mistake was made on purpose, and whether the check that is meant for it saw it."""
    if not run["mistake"]:
        return Markup()
    told = "".join(f"<p>{text(sentence)}</p>" for sentence in (mistake_sentence(run), seen_sentence(run)))
    return Markup(f'<div class="mistake">{told}</div>')


def chip_of(run: Run) -> Markup:
    """The verdict as a badge."""
    return chip(run["verdict"].upper())


def _tiles(run: Run) -> Markup:
    """The few numbers that a reader should take away."""
    tiles = "".join(
        f'<div class="tile"><b>{text(value)}</b><span>{text(about)}</span></div>' for value, about in _numbers(run)
    )
    return Markup(f'<div class="tiles">{tiles}</div>') if tiles else Markup()


def _numbers(run: Run) -> Iterator[tuple[str, str]]:
    proof = [check for check in run["checks"] if check["name"] in PROOF]
    if proof:
        failed, plain = ([c for c in proof if not c["passed"]], [c for c in proof if not c["unit"]])
        # Numbers of several units have no largest one, but one that is closest to its bound.
        worst = max(failed or plain or proof, key=lambda check: check["max_abs_diff"] / (check["tolerance"] or 1.0))
        names = {check["name"] for check in proof}
        # Where there are no losses nothing was trained: primitives are compared, not a run with one process.
        what = "from one process" if "losses" in names else f"of {' and '.join(sorted(names))}"
        what += " in float64" if plain and len(plain) < len(proof) else ""
        yield difference(worst["max_abs_diff"]), f"largest difference {what}, {allowed(worst)} allowed"
    own = pytorch_own(run)
    times = {variant["name"]: slowest(variant["step_seconds"]) for variant in run["variants"]}
    by_hand = {name: seconds for name, seconds in times.items() if seconds and name != own}
    if by_hand:
        best = min(by_hand, key=lambda name: by_hand[name])
        yield f"{milliseconds(by_hand[best])} ms", f"a step of {best}, the fastest written by hand"
        if own and (own_s := times[own]):
            yield f"{by_hand[best] / own_s:.2f} ×", f"the time of {own}, PyTorch's own"
    wire = {variant["name"]: slowest(variant["wire_bytes"]) for variant in run["variants"]}
    sent = {name: amount for name, amount in wire.items() if amount}
    if sent:
        least = min(sent, key=lambda name: sent[name])
        yield human_bytes(sent[least]), f"on the wire a step, from the rank that sends most ({least})"


def _ended(run: Run) -> Markup:
    """What did not hold, and what ended a rank: before all else, where there is such a thing."""
    wrong = [failure_sentence(claim) for claim in failures(run)] + [lost_sentence(lost) for lost in run["lost"]]
    wrong += error_sentences(run) + ([unseen_sentence(run)] if run["unseen"] else [])
    listed = Markup("<ul>" + "".join(f"<li>{text(sentence)}</li>" for sentence in wrong) + "</ul>")
    return section("What went wrong", listed) if wrong else Markup()


def _lesson(run: Run, records: Ranks) -> Markup:
    """The idea, the variants in a sentence each, the predictions with their numbers, what was said, the mistake."""
    lessons = [lesson for _, lesson in select(records, Lesson)]
    parts: list[str] = []
    for lesson in lessons[:1]:
        ran = {variant["name"] for variant in run["variants"]}
        parts += [f"<p>{text(paragraph)}</p>" for paragraph in lesson.idea]
        told = [[name, sentence] for name, sentence in lesson.variants.items() if name in ran]
        parts.append(table(["variant", "what it does"], told))
        parts.append(table(["variant", "predicted", "formula", "a rank and step", "calls"], lesson.predictions))
    for said in dict.fromkeys(said for _, said in select(records, Said)):
        words = f"<pre>{text(said.text)}</pre>" if "\n" in said.text else f"<div>{text(said.text)}</div>"
        parts.append(f'<div class="said"><b>{text(said.heading)}</b>{words}</div>')
    title = "What was said" if run["run_mode"] in (SCRIPT, PROVEN) else "The lesson"
    return section(title, *parts, _mistake(run))


def _losses(records: Ranks, colour: dict[str, str]) -> Markup:
    found = curves(records)
    if not found:
        return Markup()
    points = charts.MOST_POINTS // 2 // len(found)
    figure = charts.lines(found, "step", "loss", colour, points=points, layered=True)
    rows = [[name, len(y), f"{y[0]:.6g}", f"{y[-1]:.6g}"] for name, (_, y) in found.items() if y]
    summary = table(["", "steps", "first loss", "last loss"], rows, numbers=(1, 2, 3))
    note = "Curves that agree lie on top of each other: the first is drawn widest, so that all can be seen."
    return section("Losses", charts.drawn(figure, "losses by step", 240), summary, note=note)


def curves(records: Ranks) -> dict[str, charts.Curve]:
    """The loss curves by variant, one process first; where several ranks wrote one, the lowest rank's."""
    found: dict[str, charts.Curve] = {}
    for _, losses in select(records, Losses):
        found.setdefault(losses.variant, (list(range(len(losses.values))), losses.numbers))
    return dict(sorted(found.items(), key=lambda item: item[0] != "one process"))


def _own(records: Ranks, colour: dict[str, str]) -> Iterator[Markup]:
    """The tables and charts that the lesson made itself, in its order."""
    shown = [record for rank in sorted(records) for record in records[rank] if isinstance(record, Chart | Table)]
    tables = sum(isinstance(record, Table) for record in shown)
    series = sum(len(record.series) for record in shown if isinstance(record, Chart))
    for record in shown:
        if isinstance(record, Table):
            yield _own_table(record, max(8, MOST_ROWS // tables))
        else:
            own = charts.colours(record.series) | {name: colour[name] for name in record.series if name in colour}
            hues = own if len(set(own.values())) == len(own) else charts.colours(record.series)
            found: dict[str, charts.Curve] = {name: (xy[0], xy[1]) for name, xy in record.series.items()}
            figure = charts.lines(
                found, record.x_label, record.y_label, hues, points=max(8, charts.MOST_POINTS // 2 // max(1, series)),
                log_x=record.log_x, log_y=record.log_y,
            )  # fmt: skip
            yield section(record.title, charts.drawn(figure, record.title, 240))


def _own_table(record: Table, most: int) -> Markup:
    numbers = [
        index for index in range(len(record.columns)) if all(isinstance(row[index], int | float) for row in record.rows)
    ]
    rows = [[f"{cell:.4g}" if isinstance(cell, float) else cell for cell in row] for row in record.rows]
    more = len(rows) - most
    note = f"The first {most} rows; {more} more are in the records." if more > 0 else ""
    return section(record.title, table(record.columns, rows[:most], numbers=numbers), note=note)


def _ranks(run: Run, records: Ranks) -> Markup:
    """Where each rank ran and how it ended, and the variants that could not take part."""
    unseen = {each["rank"]: each["host"] or "" for each in run["unseen"]}
    hosts = unseen | {rank: start.host for rank, start in select(records, Start)}
    ends = dict(select(records, End))
    gone = {lost["rank"] for lost in run["lost"]}
    failed = {error["rank"]: error["exit_code"] for error in run["errors"]}
    rows: list[list[Any]] = []
    for rank in range(run["world_size"]):
        end = ends.get(rank)
        word = (
            chip("lost")
            if rank in gone
            else f"code {failed[rank]}"
            if rank in failed
            else "no records here"
            if rank in unseen
            else "to the end"
            if end
            else "cut short"
        )
        took = f"{end.ended_at - end.started_at:.1f} s" if end else ""
        rows.append([rank, hosts.get(rank, ""), took, word])
    skipped = [[skip["variant"], skip["reason"]] for skip in run["skipped"]]
    left_out = [Markup("<h3>Skipped variants</h3>"), table(["variant", "reason"], skipped)] if skipped else []
    return section("Ranks", table(["rank", "host", "duration", "ended"], rows, numbers=(0, 2)), *left_out)


def _settings(records: Ranks) -> Markup:
    start = first(records)
    command = Markup(f'<pre class="command">{text(repeat_command(records))}</pre>')
    chosen = [
        [code(name), Markup(f"<b>{text(value)}</b>") if name in start.repeat else shown(value)]
        for name, value in start.config.items()
    ]
    versions = [[name, code(version)] for name, version in start.versions.items()]
    half = (len(chosen) + 1) // 2
    columns = [table(["setting", "value"], part) for part in (chosen[:half], chosen[half:])]
    note = "Settings in bold were chosen, the others are defaults."
    settings = folded(
        f"{len(chosen)} settings and {len(versions)} versions", grid([*columns, table(["version", ""], versions)])
    )
    return section("Repeat this run", command, settings, note=note)


def shown(value: Any) -> str:
    """A setting as one would write it; "unset" for what has no value."""
    if value is None or value in ("", [], ()):
        return "unset"
    if isinstance(value, bool):
        return str(int(value))
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
